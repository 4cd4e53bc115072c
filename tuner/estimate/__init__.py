"""Prices the run that is launched today, and finds the smallest change that beats it."""
