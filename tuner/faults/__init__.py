"""Failures in long runs: checkpoints, lost work, restarts, spares, time and cost."""
