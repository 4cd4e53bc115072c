"""Requests played through serving engines, event by event."""
