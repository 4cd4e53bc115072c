"""What releases of serving engines can launch."""
