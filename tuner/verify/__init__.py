"""Check a plan by short real launches, and let what they measure correct the model."""
