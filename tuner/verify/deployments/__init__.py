"""Real launches of deployments: a server, a benchmark client, and the conclusion."""
