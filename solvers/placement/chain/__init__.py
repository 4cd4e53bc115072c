"""Low traffic between consecutive layers, from the transitions of tokens between experts."""
