"""Which node of a cluster runs which cell of the pipeline, where links are unlike."""
