"""Prices of a configuration, in seconds and bytes, from measured curves and datasheets."""
