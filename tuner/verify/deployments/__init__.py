"""Deployments launched for real: a server, a client that measures it, and what both come to."""
