"""Recorded routing: which experts the tokens of a workload went to, captured or imported."""
