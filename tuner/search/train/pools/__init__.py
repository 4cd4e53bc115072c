"""Plans over heterogeneous pools: uneven stages in one pipeline."""
