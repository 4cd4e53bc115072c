"""Cost of one iteration of a serving engine: its operations and what a step makes of them."""
