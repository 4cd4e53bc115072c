"""All that moetune knows of EPLB's own arrays."""
