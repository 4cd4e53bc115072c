"""Chooses what a source does not say as an engineer would who could predict it.

Expert parallelism: of the degrees that divide both experts and ranks, the one that is predicted to
be the fastest by the generic constants.

Recomputation: the least that fits. It is turned on when a run does not fit and not before, module
by module as the engines' guides suggest: first what is cheap to repeat, at last everything. The
peak of each choice is predicted (tuner/costs/analytic/memory.py); where not even the last one
fits, it is taken. A run whose state is too large whatever is recomputed is taken to be sharded as
FSDP does.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tuner.backtest.columns import Run
from tuner.backtest.pricing import memory_constants_of, pricer_of, regime_of
from tuner.costs.analytic.calibration import constants_of

CHOICES: Final[tuple[dict[str, float], ...]] = (
    {"recompute_layernorm": 1.0, "recompute_moe_act": 1.0, "recompute_mla_up_proj": 1.0},
    {"recompute_layernorm": 1.0, "recompute_mlp": 1.0, "recompute_moe_act": 1.0},
    {"recompute_layernorm": 1.0, "recompute_mlp": 1.0, "recompute_moe": 1.0},
    {"recompute_full": 1.0},
    {"zero_stage": 3.0},
)
"""After what the row or its recipe has, from cheap to dear; what does not even fit then was sharded
further than the table says."""


def with_assumptions(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs, what is unknown chosen: expert parallelism, then recomputation."""
    chosen = list(with_expert_degree(runs))
    asked = [place for place, run in enumerate(runs) if not run.knows_recompute]
    for fields in CHOICES:
        asked = _too_large(chosen, asked)
        for place in asked:
            run = chosen[place]
            assumed = (*run.assumed, *(("zero_or_fsdp",) if "zero_stage" in fields else ()))
            chosen[place] = replace(run, strategy=replace(run.strategy, **fields), assumed=assumed)
    return tuple(chosen)


def with_expert_degree(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs, those of unknown expert parallelism with the fastest."""
    tried = [
        (place, replace(run, strategy=replace(run.strategy, expert=degree)))
        for place, run in enumerate(runs)
        if "ep" in run.assumed
        for degree in _expert_degrees(run)
    ]
    chosen = list(runs)
    if not tried:
        return tuple(chosen)
    variants = [run for _, run in tried]
    seconds_C = pricer_of(variants).step_s(constants_of([regime_of(run) for run in variants], None))
    fastest_s: dict[int, float] = {}
    for (place, run), step_s in zip(tried, seconds_C, strict=True):
        if step_s < fastest_s.get(place, math.inf):
            fastest_s[place], chosen[place] = float(step_s), run
    return tuple(chosen)


def _expert_degrees(run: Run) -> list[float]:
    s = run.strategy
    common = math.gcd(int(s.stage_ranks / s.expert_tensor), int(run.shape.experts))
    return [float(degree) for degree in range(1, common + 1) if common % degree == 0]


def _too_large(runs: Sequence[Run], asked: Sequence[int]) -> list[int]:
    """Return which of the runs asked for do not fit."""
    if not asked:
        return []
    some = [runs[place] for place in asked]
    total_C = pricer_of(some).peaks(memory_constants_of(some)).total_C
    memory_C = np.array([float(run.hardware.memory_bytes) for run in some])
    return [place for place, fits in zip(asked, total_C <= memory_C, strict=True) if not fits]
