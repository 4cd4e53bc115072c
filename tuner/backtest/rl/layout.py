"""The columns of a table of steps of reinforcement learning; imported for the help alone."""

from collections.abc import Mapping
from typing import Final

COLUMNS: Final[Mapping[str, str]] = {
    "id": "name of the row",
    "system": "framework; NeMo-RL is predicted",
    "model": "name of the model, one of examples/models",
    "device": "h100, h200, gb200, h20, ... or the name of a device",
    "mode": "colocated-sync, disaggregated-sync or disaggregated-async",
    "staleness": "versions of the weights that responses may be behind; blank: 0",
    "train_devices, rollout_devices": "devices of either side; colocated: the same ones",
    "train_layout": "TP2 CP2 EP16 PP8; what is missing: 1",
    "rollout_layout": "TP16, and gpu_memory_utilization where it is stated",
    "rollout_engine, train_engine": "vllm and megatron",
    "algorithm": "GRPO; others discard groups or wait for tools",
    "prompts_per_step, samples_per_prompt": "blank: those of 'gen batch N' in other, 16 a prompt",
    "train_batch": "sequences of an update",
    "max_tokens": "longest sequence; 'response N': longest response",
    "mean_tokens": "mean sequence; 'response N': mean response",
    "step_s": "measured seconds of a step",
    "other": "fp8 where both sides run in it; gen batch N: sequences of a step",
    "source": "publication; v0.6 in it is the release",
}
"""Columns that a table may hold, with their meaning; everything else is ignored."""
MEASURED: Final = ("step_s", "rollout_layout")
"""Columns that make a table one of steps of reinforcement learning."""
