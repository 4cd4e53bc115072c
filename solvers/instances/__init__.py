"""Counts of instances of each kind that serve the traffic, and their KV routes."""
