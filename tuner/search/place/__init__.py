"""Placement of experts on ranks: from recordings to an evaluated plan with its certificate."""
