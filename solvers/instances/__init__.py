"""How many instances of which kind serve a traffic, and who hands requests to whom."""
