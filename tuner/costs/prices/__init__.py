"""Seconds of operations and collectives, from measured tables and closed forms."""
