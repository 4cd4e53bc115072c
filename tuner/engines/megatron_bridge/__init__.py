"""All that moetune knows of Megatron-Bridge."""
