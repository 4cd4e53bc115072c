"""Which node of a cluster runs which pipeline stage, on links of different bandwidth."""
