"""Columns of the analytic formulas for what a goal trains: adapters, frozen weights, the stack.

Four stacks put adapters beside frozen layers:

    Transformers and PEFT    eager modules, a separate adapter for each matrix, fp32 by default
    Megatron                 fused layers; one bf16 adapter of queries, keys and values, one of gate
                             and up, and one of all that linear attention projects at first
    torchtitan               fused layers; one adapter of queries, keys and values. Frozen weights
                             and adapters have originals in `training.dtype`, which FSDP2 casts
    other PyTorch            fused layers, a separate bf16 adapter for each matrix (NeMo AutoModel,
                             DeepSpeed with PEFT)

In all but the first, layers and adapters multiply in bf16 whatever type the optimizer updates.
"""

from collections.abc import Collection
from enum import StrEnum
from typing import Final

from tuner.spec.model import ModelSpec
from tuner.spec.tune import Adapters, adapted, linear_matrices, softmax_matrices

NF4_BYTES: Final = 0.5 + 1.0 / 64.0 + 4.0 / (64.0 * 256.0)
"""Bytes of a quantised parameter with its scales (tuner/costs/train/adapters.py)."""

COLUMN_OF_TARGET: Final = {
    "q_proj": "adapts_q",
    "k_proj": "adapts_k",
    "v_proj": "adapts_v",
    "o_proj": "adapts_o",
    "q_a_proj": "adapts_q_down",
    "q_b_proj": "adapts_q",
    "kv_a_proj_with_mqa": "adapts_kv_down",
    "kv_b_proj": "adapts_k",
    "gate_proj": "adapts_gate",
    "up_proj": "adapts_up",
    "down_proj": "adapts_down",
    "experts": "adapts_experts",
}
"""Matrix to the field of `Strategies` that says whether it has an adapter."""


class Stack(StrEnum):
    """Software that layers and adapters are made of."""

    TRANSFORMERS = "transformers"
    MEGATRON = "megatron"
    TORCHTITAN = "torchtitan"
    PYTORCH = "pytorch"


def stack_of(software: str, family: str = "") -> Stack:
    """Return the stack of a generation of training software (tuner/prices/train/constants.py)."""
    if software == "transformers":
        return Stack.TRANSFORMERS
    if family == "torchtitan":
        return Stack.TORCHTITAN
    return Stack.MEGATRON if software.startswith("megatron") else Stack.PYTORCH


def tune_columns(tune: Adapters | None, model: ModelSpec, stack: Stack) -> dict[str, float]:
    """Return the columns of what is trained; None: all weights.

    Raises:
        ValueError: the model lacks a target, or the rank exceeds it.
    """
    is_eager = stack is Stack.TRANSFORMERS
    columns = {"eager_modules": 1.0} if is_eager else {}
    if tune is None:
        # Eager full training keeps bf16 parameters, and gradients of their type.
        return columns | ({"gradient_bytes": 2.0} if is_eager else {})
    names = adapted(tune, model)
    elsewhere = set(linear_matrices(model)) - set(softmax_matrices(model))
    columns |= {COLUMN_OF_TARGET[name]: 1.0 for name in names if name not in elsewhere}
    columns |= _linear_columns(names, model, is_fused=stack is Stack.MEGATRON)
    wide = tune.dtype != "bf16"
    columns |= {
        "adapter_rank": float(tune.rank),
        "adapter_bytes": 4.0 if wide and is_eager else 2.0,
        "fused_qkv_adapters": float(stack in (Stack.MEGATRON, Stack.TORCHTITAN)),
        "fused_gate_adapters": float(stack is Stack.MEGATRON),
    }
    if stack is Stack.TORCHTITAN:
        columns["frozen_master_bytes"] = 4.0 if wide else 2.0
    if is_eager:
        columns["gradient_bytes"] = columns["adapter_bytes"]
    if tune.is_quantised:
        columns["frozen_bytes"] = NF4_BYTES
    return columns


def _linear_columns(
    names: Collection[str], model: ModelSpec, *, is_fused: bool
) -> dict[str, float]:
    """Count adapters of linear attention by what they read: hidden state, low ranks, its output."""
    every = linear_matrices(model)
    if not every:
        return {}
    last = next(reversed(every))
    chosen = {name: every[name] for name in every if name in names and name != last}
    first = [matrix.outputs for matrix in chosen.values() if matrix.inputs == model.hidden_size]
    second = [matrix.outputs for matrix in chosen.values() if matrix.inputs != model.hidden_size]
    return {
        "linear_adapters": float(min(len(first), 1) if is_fused else len(first)),
        "linear_adapter_outputs": float(sum(first)),
        "linear_rank_adapters": float(len(second)),
        "linear_rank_adapter_outputs": float(sum(second)),
        "adapts_linear_out": float(last in names),
    }
