"""How the steps of each engine are read off a line of its log."""
