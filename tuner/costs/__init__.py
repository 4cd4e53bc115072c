"""Seconds and bytes of a configuration: operations, what a step makes of them, memory."""
