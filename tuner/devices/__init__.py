"""Datasheets of common accelerators, so that a plan needs no profile."""
