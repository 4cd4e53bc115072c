"""All that moetune knows of TensorRT-LLM."""
