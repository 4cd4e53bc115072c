"""What a launch of a serving engine does, and the smallest change that beats it."""
