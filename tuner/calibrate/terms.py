"""Constants that are fitted, and the facts over which one value is shared.

Each constant has one or more levels, from general to specific; a level names the facts that share a
value, and its prior spread on top of the more general ones. Constants that are not listed keep
their generic value, and so do values that only one recipe would determine: its runs would be fitted
one by one, with none left for validation.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.arrays import Floats
from tuner.costs.train.calibration import Regime, Where

Level = tuple[str, ...]

FEWEST_RECIPES: Final = 2
"""Least recipes that share a value."""

TERMS: Final[Mapping[str, Mapping[Level, float]]] = {
    "matmul_ratio": {
        ("generation", "precision"): 0.15,
        ("generation", "family"): 0.09,
        ("device",): 0.09,
        ("family", "release"): 0.03,
    },
    "head_ratio": {("generation",): 0.12, ("generation", "family"): 0.09},
    "grouped_ratio": {("generation",): 0.12},
    "extra_depth": {("generation",): 0.42, ("generation", "family"): 0.3},
    "attention_ratio": {("generation",): 0.18, ("generation", "family"): 0.25},
    "attention_backward_ratio": {("family",): 0.09},
    "sink_ratio": {("generation",): 0.3},
    "memory_factor": {("generation",): 0.12, ("generation", "family"): 0.18},
    "batch_s": {("family",): 1.0},
    "score_factor": {("family",): 0.18},
    "moe_memory_factor": {
        ("generation",): 0.24,
        ("family",): 0.12,
        ("family", "release"): 0.06,
    },
    "fused_moe_factor": {("generation",): 0.24},
    "launch_s": {("family",): 0.3, ("family", "release"): 0.09, ("device", "family"): 0.09},
    "dense_launches": {("family",): 0.18},
    "moe_launches": {("generation",): 0.12},
    "expert_launches": {("generation",): 0.18, ("family",): 0.18},
    "single_step_launches": {("family",): 0.24},
    "backward_launches": {("family",): 0.09},
    "partial_graph_ratio": {("family",): 0.18},
    "scale_up_ratio": {("generation",): 0.12},
    "scale_out_ratio": {("generation",): 0.18},
    "merged_all_to_all_ratio": {("generation",): 0.18},
    "collective_s": {("family",): 0.24},
    "tensor_overlapped_ratio": {("family",): 0.24},
    "context_exposed_ratio": {("family",): 0.3},
    "expert_overlapped_ratio": {("family",): 0.18},
    "gradient_exposed_ratio": {("family",): 0.5},
    "fsdp_exposed_ratio": {("generation",): 0.36, ("generation", "family"): 0.3},
    "optimizer_bytes": {("family",): 0.3},
    "step_fixed_s": {("family",): 0.36},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """One factor that is fitted."""

    constant: str
    where: Where
    spread: float


def list_offsets(
    regimes: Sequence[Regime], groups: Sequence[str], terms: Mapping[str, Mapping[Level, float]]
) -> tuple[Offset, ...]:
    """List one offset per constant, level and distinct facts of enough recipes.

    Args:
        regimes: of the runs.
        groups: the recipe of each run.
        terms: as `TERMS`.
    """
    recipes: dict[tuple[Level, Where], set[str]] = {}
    for level in dict.fromkeys(level for levels in terms.values() for level in levels):
        for regime, group in zip(regimes, groups, strict=True):
            facts = {name: str(getattr(regime, name)) for name in level}
            if all(facts.values()):
                recipes.setdefault((level, Where(**facts)), set()).add(group)
    return tuple(
        Offset(constant=constant, where=where, spread=spread)
        for constant, levels in terms.items()
        for level, spread in levels.items()
        for (recipe_level, where), sharing in recipes.items()
        if recipe_level == level and len(sharing) >= FEWEST_RECIPES
    )


def offset_mask(offsets: Sequence[Offset], regimes: Sequence[Regime]) -> Floats:
    """Return which offset applies to which regime, [P, C] of 0 and 1."""
    return np.array(
        [[float(offset.where.holds(regime)) for regime in regimes] for offset in offsets]
    )
