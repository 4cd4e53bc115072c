"""Assignment of layers to several heterogeneous pools, as a chain of stages."""
