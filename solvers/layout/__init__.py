"""Layers -> pipeline stages, with what each stage recomputes, under a memory limit per device."""
