"""Cost of one iteration of a serving engine: operations from measured tables or datasheets."""
