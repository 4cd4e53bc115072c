"""Checkpoints of the reference training step: on shared storage, and in the memory of nodes."""
