"""Fits the few constants that no datasheet states to measured runs, and says how well they hold."""
