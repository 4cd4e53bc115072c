"""All that moetune knows of SGLang."""
