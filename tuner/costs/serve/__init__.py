"""What one iteration of a serving engine costs: operations from measured tables or datasheets."""
