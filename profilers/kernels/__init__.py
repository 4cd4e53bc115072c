"""Kernels of one device, timed as training uses them."""
