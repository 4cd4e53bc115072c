"""Collectives and constants of training."""
