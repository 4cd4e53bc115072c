"""Conversion of costs to problems that solvers understand, and of solutions to decisions."""
