"""Adapters by the names of Megatron-Bridge's `LoRA(target_modules=)`.

Megatron-Core fuses queries, keys and values (linear_qkv), gate and up (linear_fc1), and all that
Mamba-2 or the gated delta rule projects at first (in_proj), so an adapter covers all of a fused
layer. Patterns with `*` match whole paths of modules.

Read from src/megatron/bridge/peft/lora.py and module_matcher.py of v0.3.0 to v0.5.0 of
github.com/NVIDIA-NeMo/Megatron-Bridge.
"""

from typing import Any, Final

from profilers.steps.config import LayerKind
from tuner.engines.megatron_lm.core import Core
from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec
from tuner.spec.tune import EXPERTS, JOINED_INPUTS, SPLIT_INPUTS, adapted

_ATTENTION: Final = {
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
    "o_proj": "linear_proj",
    "in_proj": "in_proj",
    **dict.fromkeys((*JOINED_INPUTS, *SPLIT_INPUTS), "in_proj"),
    "out_proj": "out_proj",
}


def lora_arguments(
    model: ModelSpec, goal: TrainGoal, *, core: Core = Core.V0_18
) -> dict[str, Any] | None:
    """Return the arguments of `LoRA`; None where all weights are trained."""
    tune = goal.adapters
    if tune is None:
        return None
    # Otherwise all experts of a rank share one adapter, as they always do in older releases.
    per_expert = {"share_expert_adapters": False} if core is Core.V0_18 else {}
    return {
        "target_modules": list(_modules(adapted(tune, model), model)),
        "dim": tune.rank,
        "alpha": tune.effective_alpha,
        "dropout": 0.0,
        **per_expert,
    }


def _modules(names: tuple[str, ...], model: ModelSpec) -> tuple[str, ...]:
    query = "linear_q_proj" if model.attention.kind == "mla" else "linear_qkv"
    networks = ["*.mlp"] if LayerKind.DENSE in model.layers else []
    if model.moe is not None and model.moe.shared_ffn_size:
        networks.append("*.shared_experts")
    modules = [query] if "q_proj" in names else []
    modules += dict.fromkeys(_ATTENTION[name] for name in names if name in _ATTENTION)
    if "up_proj" in names:
        modules += [f"{network}.linear_fc1" for network in networks]
    if "down_proj" in names:
        modules += [f"{network}.linear_fc2" for network in networks]
    if EXPERTS in names:
        modules += ["*.experts.linear_fc1", "*.experts.linear_fc2"]
    return tuple(modules)
