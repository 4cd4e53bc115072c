"""Serving goals: traffic, SLO, engine."""
