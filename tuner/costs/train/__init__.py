"""Closed formulas for the training step of production engines, over arrays of strategies."""
