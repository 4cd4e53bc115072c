"""Fine-tuning of Transformers' models, with PEFT's adapters or all weights."""
