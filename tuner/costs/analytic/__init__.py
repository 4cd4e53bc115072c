"""The step of production engines as closed formulas over arrays of strategies."""
