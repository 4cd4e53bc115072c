"""Measurements that others took, read into our stored profile."""
