"""Which layers run on which of several pools of unlike devices, as a chain of stages."""
