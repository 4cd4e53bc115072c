"""Reading the `config.json` of Hugging Face models, without their libraries and network."""
