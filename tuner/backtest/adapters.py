"""What published fine-tuning runs train: the adapters of their recipes.

A row says `lora`, and nothing of rank or targets. Both sources take rank 16:

    Megatron-Bridge   Llama 3 70B: dim 16, alpha 32, target_modules ["linear_qkv"], and the
                      distributed optimizer (llama3_70b_lora_8gpu_gb300_*_config of
                      src/megatron/bridge/perf_recipes/llama)
    NeMo AutoModel    dim 16, alpha 32, `*_proj`, bf16 adapters in one Triton kernel a pass
                      (examples/llm_benchmark, *_peft_benchmark*.yaml); on several devices it
                      checkpoints activations, on one it does not say so

Not covered: rows whose recipe trains others.
"""

from dataclasses import replace
from typing import Final

from tuner.backtest.engines import SoftwareFamily
from tuner.backtest.rows import Row
from tuner.costs.train.shapes import ModelShape

WORKLOADS: Final = ("lora", "peft")
RANK: Final = 16.0
FUSED_QKV: Final = ("adapts_q", "adapts_k", "adapts_v")
ATTENTION: Final = (*FUSED_QKV, "adapts_o")
NETWORK: Final = ("adapts_gate", "adapts_up", "adapts_down")


def trains_adapters(row: Row) -> bool:
    """Whether the row trains adapters beside frozen weights."""
    return row.text("workload").lower() in WORKLOADS


def engine_with_adapters(row: Row, engine: SoftwareFamily) -> SoftwareFamily:
    """Return what a recipe with adapters has instead of the engine's defaults."""
    is_plain = engine.family == "automodel" and row.number_or("num_gpus", 0.0) == 1.0
    return replace(engine, recompute="") if is_plain else engine


def adapter_columns(row: Row, shape: ModelShape, engine: SoftwareFamily) -> dict[str, float]:
    """Return fields of `Strategies`; none where all weights are trained.

    Raises:
        ValueError: the recipe is not known.
    """
    if not trains_adapters(row):
        return {}
    if engine.family not in ("nemo", "automodel"):
        raise ValueError(f"workload lora: rank and targets of {engine.family} are not known")
    if shape.is_mla:
        raise ValueError("workload lora: adapters of latent attention are not known")
    is_fused = engine.family == "nemo"
    linear = (*ATTENTION, *NETWORK, *(("adapts_experts",) if shape.experts else ()))
    adapted = FUSED_QKV if is_fused else linear
    return {
        "adapter_rank": RANK,
        "fused_qkv_adapters": float(is_fused),
        **dict.fromkeys(adapted, 1.0),
    }
