"""Costs of the reference training step: layers as operations, memory, the update."""
