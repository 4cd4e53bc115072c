"""Costs of reinforcement learning beyond a training step: packing, forward passes, switches."""
