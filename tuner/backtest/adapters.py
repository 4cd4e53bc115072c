"""Adapters of fine-tuning runs, from their columns: rank and targets."""

from typing import Final

from tuner.backtest.rows import Row
from tuner.config.shapes import ModelShape

WORKLOADS: Final = ("lora", "peft")
FUSED: Final = "qkv"
"""One adapter for queries, keys and values together."""
TARGETS: Final = ("q", "k", "v", "o", "gate", "up", "down", "experts")


def trains_adapters(row: Row) -> bool:
    """Return whether the row trains adapters beside frozen weights."""
    return row.text("workload").lower() in WORKLOADS


def adapter_columns(row: Row, shape: ModelShape) -> dict[str, float]:
    """Return fields of `Strategies`; none where all weights are trained.

    Raises:
        ValueError: rank or targets are missing, or are not known.
    """
    if not trains_adapters(row):
        return {}
    named = [part.strip().lower() for part in row.text("lora_targets").split("+") if part.strip()]
    if "lora_rank" not in row.numbers or not named:
        raise ValueError("workload lora: lora_rank and lora_targets are needed")
    unknown = sorted({*named} - {FUSED, *TARGETS})
    if unknown:
        raise ValueError(
            f"lora_targets {unknown[0][:40]!r} is none of {FUSED}, {', '.join(TARGETS)}"
        )
    if shape.is_mla:
        raise ValueError("workload lora: adapters of latent attention are not known")
    adapted = {*named, "q", "k", "v"} if FUSED in named else {*named}
    return {
        "adapter_rank": row.numbers["lora_rank"],
        "fused_qkv_adapters": float(FUSED in named),
        **{f"adapts_{name}": 1.0 for name in TARGETS if name in adapted},
    }
