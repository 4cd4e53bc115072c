"""What each launch target can express: one file per program, its releases inside."""
