"""Recorded routing: which experts the tokens of a workload went to, as engines recorded it."""
