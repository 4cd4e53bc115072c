"""Pictures and pages about plans, as text."""
