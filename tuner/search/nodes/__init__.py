"""Order of nodes for a plan's ranks, where the links between nodes were measured."""
