"""What the user asks for: the model, the cluster, the goal, the limits on the search."""
