"""The reference training step: a real MoE transformer, trained for a few steps and metered."""
