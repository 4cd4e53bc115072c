"""Evenly loaded ranks: replica counts and slots for one workload or several."""
