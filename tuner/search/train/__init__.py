"""Exact search of training strategies on the analytic model, many at a time."""
