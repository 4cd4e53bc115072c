"""All that moetune knows of torchtitan."""
