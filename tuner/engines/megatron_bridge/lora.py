"""Adapters by the names of Megatron-Bridge's `LoRA(target_modules=)`.

Megatron-Core fuses queries, keys and values (linear_qkv), and gate and up (linear_fc1), so an
adapter covers all of a fused layer. Patterns with `*` match whole paths of modules.

Read from src/megatron/bridge/peft/lora.py and module_matcher.py of v0.3.0 to v0.5.0 of
github.com/NVIDIA-NeMo/Megatron-Bridge.
"""

from typing import Any, Final

from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec
from tuner.spec.tune import EXPERTS, adapted

_ATTENTION: Final = {
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
}
_NETWORKS: Final = ("*.mlp", "*.shared_experts")


def lora_arguments(model: ModelSpec, goal: TrainGoal) -> dict[str, Any] | None:
    """Return the arguments of `LoRA`; None where all weights are trained."""
    tune = goal.adapters
    if tune is None:
        return None
    names = adapted(tune, model)
    return {
        "target_modules": list(_modules(names, is_mla=model.attention.kind == "mla")),
        "dim": tune.rank,
        "alpha": tune.scale,
        "dropout": 0.0,
    }


def _modules(names: tuple[str, ...], *, is_mla: bool) -> tuple[str, ...]:
    query = "linear_q_proj" if is_mla else "linear_qkv"
    modules = [query] if "q_proj" in names else []
    modules += [_ATTENTION[name] for name in names if name in _ATTENTION]
    if "up_proj" in names:
        modules += [f"{network}.linear_fc1" for network in _NETWORKS]
    if "down_proj" in names:
        modules += [f"{network}.linear_fc2" for network in _NETWORKS]
    if EXPERTS in names:
        modules += ["*.experts.linear_fc1", "*.experts.linear_fc2"]
    return tuple(modules)
