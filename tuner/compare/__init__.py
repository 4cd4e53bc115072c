"""Two or more plans of one goal beside each other: what differs, and what is better."""
