"""All that moetune knows of vLLM's AFD plugin (attention and FFN on different devices)."""
