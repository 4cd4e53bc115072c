"""Writes a placement in the files that each engine reads."""
