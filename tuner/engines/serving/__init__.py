"""Launch files of serving deployments, by target."""
