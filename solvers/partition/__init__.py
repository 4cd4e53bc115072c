"""Which layers run on which of several heterogeneous pools, as a chain of stages."""
