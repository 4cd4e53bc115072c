"""Fills in what a source does not state, choosing what is predicted to be best.

Expert parallelism: of the degrees that divide both experts and ranks, the one that is predicted to
be the fastest by the generic constants.

Recomputation: none where that fits. Else the fastest setting that fits, by the
predicted time and peak (tuner/costs/train/memory.py): recomputed modules, as the engines'
guides suggest them, or, in Megatron-Core without a pipeline, saved activations in host memory,
which excludes recomputation and CUDA graphs there (megatron/core/transformer/
transformer_config.py). A run that nothing makes fit is taken to be sharded as FSDP does, and the
choice is repeated; where even that does not fit, everything is recomputed.

Not covered: an unknown micro-batch or pipeline depth, which are taken as printed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from tuner.backtest.columns import PublishedRun
from tuner.backtest.prices import build_pricer, run_memory_constants, run_regime
from tuner.costs.train.calibration import constants_of
from tuner.prices.train.constants import Software

Fields = Mapping[str, float]
"""Values by field of `Strategies`."""

_CHEAP: Final = {
    "recompute_layernorm": 1.0,
    "recompute_moe_act": 1.0,
    "recompute_mla_up_proj": 1.0,
}
RECOMPUTED: Final[tuple[Fields, ...]] = (
    {},
    _CHEAP,
    {**_CHEAP, "recompute_mlp": 1.0},
    {**_CHEAP, "recompute_mlp": 1.0, "recompute_moe": 1.0},
    {**_CHEAP, "recompute_mlp": 1.0, "recompute_moe": 1.0, "recompute_full": 1.0},
)
"""Recomputation from none to full, added to what the row or its recipe states."""
OFFLOADED: Final[tuple[Fields, ...]] = tuple(
    {"activation_offload": share, "partial_graph": 0.0, "full_graph": 0.0}
    for share in (0.25, 0.5, 0.75, 1.0)
)
"""Quarters of the layers; Megatron-Bridge's recipes offload 20 to 92 of 80 to 126."""
OFFLOADING: Final = (Software.MEGATRON_2025, Software.MEGATRON_2026)
SHARDED: Final = {"zero_stage": 3.0}
COLUMNS: Final = {"zero_or_fsdp": "zero_stage", "cpu_offload_layers": "activation_offload"}
"""Columns that a choice fills, and the field that it sets."""


def with_assumptions(runs: Sequence[PublishedRun]) -> tuple[PublishedRun, ...]:
    """Return the runs with unknown expert parallelism, then unknown recomputation, chosen."""
    chosen = list(with_expert_degree(runs))
    unknown = [place for place, run in enumerate(runs) if not run.knows_recompute]
    unknown = _too_large(chosen, unknown)
    for fields in ({}, SHARDED):
        fitting = _fitting(chosen, unknown, fields)
        for place, run in fitting.items():
            chosen[place] = run
        unknown = [place for place in unknown if place not in fitting]
    for place in unknown:
        chosen[place] = _variant(chosen[place], {**SHARDED, **RECOMPUTED[-1]})
    return tuple(chosen)


def with_expert_degree(runs: Sequence[PublishedRun]) -> tuple[PublishedRun, ...]:
    """Return the runs, unknown expert parallelism set to the fastest degree."""
    tried = [
        (place, replace(run, strategy=replace(run.strategy, expert=degree)))
        for place, run in enumerate(runs)
        if "ep" in run.assumed
        for degree in _expert_degrees(run)
    ]
    chosen = list(runs)
    for place, run in _fastest(tried).items():
        chosen[place] = run
    return tuple(chosen)


def _expert_degrees(run: PublishedRun) -> list[float]:
    s = run.strategy
    common = math.gcd(int(s.stage_ranks / s.expert_tensor), int(run.shape.experts))
    return [float(degree) for degree in range(1, common + 1) if common % degree == 0]


def _fitting(
    runs: Sequence[PublishedRun], places: Sequence[int], fields: Fields
) -> dict[int, PublishedRun]:
    """Return the fastest variant that fits of every given run that has one."""
    tried = [
        (place, _variant(runs[place], {**fields, **choice}))
        for place in places
        for choice in (*RECOMPUTED, *(OFFLOADED if _can_offload(runs[place]) else ()))
    ]
    too_large = set(_too_large([run for _, run in tried], range(len(tried))))
    return _fastest([pair for index, pair in enumerate(tried) if index not in too_large])


def _can_offload(run: PublishedRun) -> bool:
    s = run.strategy
    repeats = any(float(getattr(s, name)) for name in RECOMPUTED[-1])
    return run.software in OFFLOADING and float(s.pipeline) == 1.0 and not repeats


def _variant(run: PublishedRun, fields: Fields) -> PublishedRun:
    assumed = tuple(name for name in COLUMNS if COLUMNS[name] in fields)
    return replace(run, strategy=replace(run.strategy, **fields), assumed=(*run.assumed, *assumed))


def _fastest(tried: Sequence[tuple[int, PublishedRun]]) -> dict[int, PublishedRun]:
    """Return the fastest run of each place by the generic constants; of equals the first."""
    if not tried:
        return {}
    runs = [run for _, run in tried]
    seconds_C = build_pricer(runs).step_s(constants_of([run_regime(run) for run in runs], None))
    fastest: dict[int, PublishedRun] = {}
    fastest_s: dict[int, float] = {}
    for (place, run), step_s in zip(tried, seconds_C, strict=True):
        if step_s < fastest_s.get(place, math.inf):
            fastest_s[place], fastest[place] = float(step_s), run
    return fastest


def _too_large(runs: Sequence[PublishedRun], places: Sequence[int]) -> list[int]:
    """Return which of the given runs do not fit."""
    if not places:
        return []
    some = [runs[place] for place in places]
    total_C = build_pricer(some).peaks(run_memory_constants(some)).total_C
    memory_C = np.array([float(run.hardware.memory_bytes) for run in some])
    return [place for place, fits in zip(places, total_C <= memory_C, strict=True) if not fits]
