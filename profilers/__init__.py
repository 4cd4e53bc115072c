"""Measure kernels, links, storage and whole training steps: Case -> Measurement -> Profile."""
