"""Short ways between consecutive layers: transitions of tokens from expert to expert."""
