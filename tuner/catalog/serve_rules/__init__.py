"""Rules for the deployments that releases of serving engines can launch."""
