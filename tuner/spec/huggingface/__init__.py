"""Reading the `config.json` of Hugging Face models: no library of theirs, no network."""
