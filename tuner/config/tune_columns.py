"""What a goal trains, as columns of the analytic formulas: adapters, frozen weights, the stack.

Three stacks put adapters beside frozen layers:

    Transformers and PEFT    eager modules, a separate adapter for each matrix, fp32 by default
    Megatron                 fused layers; one bf16 adapter of queries, keys and values, and one of
                             gate and up
    other PyTorch            fused layers, a separate bf16 adapter for each matrix (NeMo AutoModel)
"""

from enum import StrEnum
from typing import Final

from tuner.spec.model import ModelSpec
from tuner.spec.tune import Adapters, adapted

NF4_BYTES: Final = 0.5 + 1.0 / 64.0 + 4.0 / (64.0 * 256.0)
"""Of a quantised parameter with its scales (tuner/costs/train/adapters.py)."""

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
    """What layers and adapters are made of."""

    TRANSFORMERS = "transformers"
    MEGATRON = "megatron"
    PYTORCH = "pytorch"


def stack_of(software: str) -> Stack:
    """Return the stack of a generation of training software (tuner/costs/train/constants.py)."""
    if software == "transformers":
        return Stack.TRANSFORMERS
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
    columns |= {COLUMN_OF_TARGET[name]: 1.0 for name in adapted(tune, model)}
    wide = tune.dtype == "fp32" or (tune.dtype is None and is_eager)
    columns |= {
        "adapter_rank": float(tune.rank),
        "adapter_bytes": 4.0 if wide else 2.0,
        "fused_adapters": float(stack is Stack.MEGATRON),
    }
    if is_eager:
        columns["gradient_bytes"] = columns["adapter_bytes"]
    if tune.is_quantised:
        columns["frozen_bytes"] = NF4_BYTES
    return columns
