"""Specs: the model, the cluster, the goal, the limits on the search."""
