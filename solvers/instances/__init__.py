"""How many instances of each kind serve the traffic, and their KV routes."""
