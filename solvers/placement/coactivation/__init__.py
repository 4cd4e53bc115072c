"""Few ranks and nodes touched by a token: experts that are chosen together are co-located."""
