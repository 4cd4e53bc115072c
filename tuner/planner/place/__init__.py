"""Experts on ranks: from recordings to a judged plan with its certificate."""
