"""Reasons for a plan, what-ifs under other limits, each solved again, and comparisons."""
