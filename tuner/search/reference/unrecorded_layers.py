"""Expert loads of every MoE layer from a recording that may cover only some of them.

A layer that was not recorded takes the loads of the nearest recorded one, the earlier on ties. The
step needs loads expert by expert, and those of two layers cannot be averaged: their experts have
nothing in common. Where the imbalance alone is needed, the mean of the recorded layers is nearer
(tuner/costs/train/expert_imbalance.py).
"""

from profilers.steps.config import LayerKind
from tuner.spec.goal import Phase
from tuner.spec.model import ModelSpec
from tuner.spec.routing import LoadRatios, RoutingRecord


def load_ratios(model: ModelSpec, record: RoutingRecord, phase: Phase) -> LoadRatios:
    """Return the expert load shares of every MoE layer: [MoE layers][experts]."""
    recorded = record.of_phase(phase)
    rows = []
    for layer, kind in enumerate(model.layers):
        if kind is not LayerKind.MOE:
            continue
        rows.append(recorded[_nearest(record.layer_ids, layer)])
    return tuple(rows)


def _nearest(layer_ids: tuple[int, ...], layer: int) -> int:
    distance = [abs(recorded - layer) for recorded in layer_ids]
    return distance.index(min(distance))
