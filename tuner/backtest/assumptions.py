"""Chooses what a run recomputes where its source does not say: the least that fits in memory.

An engineer turns recomputation on when a run does not fit and not before, module by module as the
engine's guides suggest: first what is cheap to repeat, at last everything. The peak of each choice
is predicted (tuner/costs/analytic/memory.py); where not even the last one fits, it is taken. A
run whose state is too large whatever is recomputed is taken to be sharded as FSDP does.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tuner.backtest.columns import Run
from tuner.backtest.pricing import memory_constants_of, pricer_of

CHOICES: Final[tuple[dict[str, float], ...]] = (
    {"recompute_layernorm": 1.0, "recompute_moe_act": 1.0, "recompute_mla_up_proj": 1.0},
    {"recompute_layernorm": 1.0, "recompute_mlp": 1.0, "recompute_moe_act": 1.0},
    {"recompute_layernorm": 1.0, "recompute_mlp": 1.0, "recompute_moe": 1.0},
    {"recompute_full": 1.0},
    {"zero_stage": 3.0},
)
"""After what the row or its recipe has, from cheap to dear; what does not even fit then was sharded
further than the table says."""


def with_recompute(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs, those of unknown recomputation with the least that fits."""
    chosen = list(runs)
    asked = [place for place, run in enumerate(runs) if not run.knows_recompute]
    for fields in CHOICES:
        asked = _too_large(chosen, asked)
        for place in asked:
            run = chosen[place]
            assumed = (*run.assumed, *(("zero_or_fsdp",) if "zero_stage" in fields else ()))
            chosen[place] = replace(run, strategy=replace(run.strategy, **fields), assumed=assumed)
    return tuple(chosen)


def _too_large(runs: Sequence[Run], asked: Sequence[int]) -> list[int]:
    """Return which of the runs asked for do not fit."""
    if not asked:
        return []
    some = [runs[place] for place in asked]
    total_C = pricer_of(some).peaks(memory_constants_of(some)).total_C
    memory_C = np.array([float(run.hardware.memory_bytes) for run in some])
    return [place for place, fits in zip(asked, total_C <= memory_C, strict=True) if not fits]
