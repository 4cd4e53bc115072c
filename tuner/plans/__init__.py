"""Plans of every goal as they are stored: decision, prediction, certificate, provenance."""
