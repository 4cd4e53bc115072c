"""From measured curves to seconds and bytes of a training configuration."""
