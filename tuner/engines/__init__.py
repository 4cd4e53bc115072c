"""All that is known of single engines: capabilities, launch files written and read, metrics."""
