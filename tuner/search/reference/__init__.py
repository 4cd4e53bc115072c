"""From costs to problems that solvers understand, and back to decisions."""
