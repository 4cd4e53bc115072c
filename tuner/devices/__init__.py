"""Descriptions of the usual accelerators, so that a plan needs no profile."""
