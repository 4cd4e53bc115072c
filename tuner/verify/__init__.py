"""Check a plan by short real launches, and recalibrate the model with the measurements."""
