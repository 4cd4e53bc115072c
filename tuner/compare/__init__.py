"""Compares two or more plans of one goal: what differs, and which is better."""
