"""One file per launch format: text in, `LaunchSettings` out."""
