"""Estimates of launches of reinforcement learning."""
