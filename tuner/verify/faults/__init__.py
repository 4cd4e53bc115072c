"""Real runs that suffer faults, against what the models of checkpoints predict of them."""
