"""Checkpoints of the reference training step on shared storage."""
