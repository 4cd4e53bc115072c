"""Spends a budget of time and devices on trials, some of them scaled down."""
