"""Experts on ranks: which expert is in which slot of every layer."""
