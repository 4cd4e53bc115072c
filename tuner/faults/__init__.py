"""What failures do to a run of weeks: checkpoints, lost work, restarts, spares, time and cost."""
