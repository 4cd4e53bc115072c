"""Trials as Slurm jobs."""
