"""All that moetune knows of Megatron-SWIFT, the training program of ms-swift."""
