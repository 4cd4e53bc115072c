"""All that moetune knows of Megatron-LM."""
