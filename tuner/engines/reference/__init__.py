"""All that moetune knows of the reference training step of profilers/steps."""
