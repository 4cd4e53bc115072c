"""Which node runs which ranks of a plan, where the links between nodes were measured one by one."""
