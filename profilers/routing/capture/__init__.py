"""Capture: a Hugging Face model reads text, and hooks on its gates note where its tokens go."""
