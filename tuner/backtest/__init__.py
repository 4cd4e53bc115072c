"""Compares what is predicted with what others measured and published."""
