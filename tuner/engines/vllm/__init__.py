"""All that moetune knows of vLLM."""
