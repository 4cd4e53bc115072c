"""Trials as jobs of Slurm."""
