"""Writes launch files: one module per target, pure functions from a verified plan to text."""
