"""Rules that a decision must keep on a launch target, by the fields of its manifest."""
