"""Plays schedules through event by event, where a closed form only estimates."""
