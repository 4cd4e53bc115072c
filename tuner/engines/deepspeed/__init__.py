"""All that moetune knows of DeepSpeed."""
