"""Reads what a published run recomputes in its backward pass.

Names are Megatron's modules, joined by +; `full` is every layer as a whole; `selective` is the core
of attention in Megatron-LM (arXiv:2205.05198) and, in torchtitan, all but attention and every
second GEMM.
"""

from collections.abc import Mapping
from typing import Final

from tuner.backtest.rows import Row
from tuner.config.knobs import COLUMN_OF_MODULE

FIELD_OF_MODULE: Final[Mapping[str, str]] = {
    "full": "recompute_full",
    "selective": COLUMN_OF_MODULE["core_attn"],
    **COLUMN_OF_MODULE,
}
"""Module to the field of `Strategies` with its recomputed share."""
NOTHING: Final = ("none", "off", "false")
ALSO: Final = ("sp",)
"""Other words in the column: sequence parallelism."""


def read_recompute(row: Row, *, stage_layers: float, by_op: bool) -> dict[str, float] | None:
    """Return fields of `Strategies`, or None where the row does not say.

    Raises:
        ValueError: a module is not one of Megatron's.
    """
    text = "+".join(part for part in (row.text("recompute"), row.text("recompute_modules")) if part)
    whole = row.number_or("recompute_num_layers", 0.0)
    if not text and not whole:
        return None
    fields: dict[str, float] = {}
    for module in (part.strip().lower() for part in text.split("+")):
        if not module or module in (*NOTHING, *ALSO):
            continue
        if by_op and module.startswith("selective"):
            fields["recompute_by_op"] = 1.0
            continue
        if module not in FIELD_OF_MODULE:
            known = ", ".join(FIELD_OF_MODULE)
            raise ValueError(f"recompute {module[:40]!r} is none of none, {known}")
        fields[FIELD_OF_MODULE[module]] = 1.0
    if whole:
        fields["recompute_full"] = min(1.0, whole / stage_layers)
    return fields
