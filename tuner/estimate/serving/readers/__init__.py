"""One reader per serving engine."""
