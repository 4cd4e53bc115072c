"""Kernels and collectives of serving, from tables, profiles or datasheets."""
