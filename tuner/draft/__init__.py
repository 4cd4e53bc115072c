"""A spec from a few values: its fields, their checks, and the commented file."""
