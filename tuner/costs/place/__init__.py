"""Seconds of the expert layers of a placement."""
