"""Event-by-event simulation, where a closed form only estimates."""
