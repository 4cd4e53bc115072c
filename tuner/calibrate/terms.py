"""Which constants are fitted, and for how much of the world one value is shared.

Each constant has one or more levels, from wide to narrow; a level names the facts that one value is
shared over, and the spread that a value may have on top of the wider ones. What is not listed
keeps its generic value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.calibrate.fit import Floats
from tuner.costs.analytic.calibration import Regime, Where

Level = tuple[str, ...]

TERMS: Final[Mapping[str, Mapping[Level, float]]] = {
    "matmul_ratio": {
        ("generation", "precision"): 0.25,
        ("generation", "precision", "family"): 0.2,
        ("device",): 0.05,
    },
    "grouped_ratio": {("generation", "family"): 0.2},
    "extra_depth": {("generation", "family"): 0.7},
    "attention_ratio": {("generation",): 0.3, ("generation", "family"): 0.3},
    "attention_backward_ratio": {("family",): 0.15},
    "sink_ratio": {("generation",): 0.5},
    "memory_factor": {("generation",): 0.2, ("generation", "family"): 0.3},
    "score_factor": {("family",): 0.3},
    "moe_memory_factor": {("generation", "family"): 0.4},
    "fused_moe_factor": {("family",): 0.4},
    "launch_s": {("family",): 0.5, ("family", "release"): 0.1},
    "moe_launches": {("family",): 0.3},
    "expert_launches": {("family",): 0.3},
    "partial_graph_ratio": {("family",): 0.3},
    "scale_up_ratio": {("generation",): 0.2, ("generation", "family"): 0.1},
    "scale_out_ratio": {("generation",): 0.3},
    "all_to_all_ratio": {("generation", "family"): 0.3},
    "collective_s": {("family",): 0.4},
    "tensor_overlapped_ratio": {("family",): 0.4},
    "context_exposed_ratio": {("family",): 0.5},
    "expert_overlapped_ratio": {("family",): 0.3},
    "gradient_exposed_ratio": {("family",): 0.5},
    "fsdp_exposed_ratio": {("generation", "family"): 0.6},
    "optimizer_bytes": {("family",): 0.2},
    "step_fixed_s": {("family",): 0.6},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Offset:
    """One factor that is fitted."""

    constant: str
    where: Where
    spread: float


def offsets_of(
    regimes: Sequence[Regime], terms: Mapping[str, Mapping[Level, float]]
) -> tuple[Offset, ...]:
    """List one offset per constant, level and distinct facts of the regimes."""
    found: dict[tuple[str, Where], float] = {}
    for constant, levels in terms.items():
        for level, spread in levels.items():
            for regime in regimes:
                facts = {name: str(getattr(regime, name)) for name in level}
                if all(facts.values()):
                    found[constant, Where(**facts)] = spread
    return tuple(
        Offset(constant=constant, where=where, spread=spread)
        for (constant, where), spread in found.items()
    )


def holding(offsets: Sequence[Offset], regimes: Sequence[Regime]) -> Floats:
    """Say which offset holds for which regime, [P, C] of 0 and 1."""
    return np.array(
        [[float(offset.where.holds(regime)) for regime in regimes] for offset in offsets]
    )
