"""Experts on ranks: which expert stands in which slot of every layer."""
