"""NeMo-RL: reinforcement learning on Megatron and vLLM, configured by YAML."""
