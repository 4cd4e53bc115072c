"""What a deployment is for: its traffic, its targets, its engine."""
