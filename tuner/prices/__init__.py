"""Prices: sizes of operations become seconds here, and nowhere else."""
