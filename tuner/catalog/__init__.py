"""What engines can do: manifests, rules and traits, and the registry that finds each engine."""
