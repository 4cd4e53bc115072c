"""Reasons why a plan was chosen, and what-ifs under other limits, each solved again."""
