"""Event-by-event simulation of requests on serving engines."""
