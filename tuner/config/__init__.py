"""Configurations of every goal, and how they read."""
