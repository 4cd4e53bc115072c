"""A spec from a few answers: what to ask, what is acceptable, and the commented file."""
