"""Launch files of deployments that serve, by target."""
