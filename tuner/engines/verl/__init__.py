"""verl: reinforcement learning on Megatron and vLLM or SGLang, configured by Hydra."""
