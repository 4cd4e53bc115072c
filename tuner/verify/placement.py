"""Measures placements: expert GEMMs with the rows that a recorded pass gives each rank.

    L layers   S slots   G ranks

A layer takes as long as its slowest rank. Of each measured layer the ranks with most rows and the
one with most active experts are run, one after another on the device at hand, and the slowest
counts. All-to-all and the rest of a pass are not measured.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from solvers.placement.ranks import Floats
from tuner.config.place import PlaceDecision
from tuner.verify.placement_records import PlaceTrial, PlaceVerified

RANKS_TRIED = 2
"""Ranks with the most rows that are tried; one more has the most active experts."""
MOST_LAYERS = 8
"""Measured layers, at most; evenly spread."""

TimeLoads = Callable[[Sequence[Sequence[int]]], tuple[str, tuple[tuple[float, ...], ...]]]
"""Rows of each expert of each load -> device, seconds of repeats."""
PriceLoads = Callable[[Floats, Floats], Floats]
"""Rows and active experts -> predicted seconds."""


def verify_placements(
    decisions: Mapping[str, PlaceDecision],
    *,
    load_LE: Floats,
    time_loads: TimeLoads,
    price_loads: PriceLoads | None,
) -> PlaceVerified:
    """Run every placement and compare them.

    Args:
        decisions: by name; the first is the plan's choice.
        load_LE: token copies of one recorded pass.
        time_loads: times expert GEMMs.
        price_loads: predicts them; None if no model and device were named.
    """
    count = min(MOST_LAYERS, len(load_LE))
    layers = sorted({round(step) for step in np.linspace(0, len(load_LE) - 1, count)})
    at, loads = [], []
    for name, decision in decisions.items():
        for layer in layers:
            for rows in _slow_ranks(decision, layer, load_LE[layer]):
                at.append((name, layer))
                loads.append(rows)
    device, seconds = time_loads(loads)
    measured = _layer_times(at, [statistics.median(times) for times in seconds])
    predicted: Mapping[str, float] = {}
    if price_loads is not None:
        active = np.array([float(sum(map(bool, rows))) for rows in loads])
        priced = price_loads(np.array([float(sum(rows)) for rows in loads]), active)
        predicted = _layer_times(at, priced.tolist())
    chosen, winner = next(iter(decisions)), min(decisions, key=lambda name: measured[name])
    return PlaceVerified(
        device=device,
        layers=tuple(decisions[chosen].layer_ids[layer] for layer in layers),
        trials=tuple(
            PlaceTrial(
                decision=name,
                predicted_layer_time_s=predicted.get(name),
                measured_layer_time_s=measured[name],
            )
            for name in decisions
        ),
        winner=winner,
        regret_ratio=measured[chosen] / measured[winner] - 1.0,
    )


def rows_of_slots(expert_S: Sequence[int], load_E: Floats) -> list[int]:
    """Rows of every slot: replicas share an expert's rows evenly, the first take the remainder."""
    share_E, left_E = np.divmod(np.rint(load_E).astype(np.int64), np.bincount(expert_S))
    return [
        int(share_E[expert] + (expert_S[:slot].count(expert) < left_E[expert]))
        for slot, expert in enumerate(expert_S)
    ]


def _slow_ranks(decision: PlaceDecision, layer: int, load_E: Floats) -> list[list[int]]:
    """Return the rows of the ranks that may be the slowest of a layer."""
    rows_S = rows_of_slots(decision.physical_to_logical[layer], load_E)
    parts = np.split(np.array(rows_S), np.cumsum(decision.slots_per_rank)[:-1])
    ranks = sorted((part.tolist() for part in parts), key=sum, reverse=True)
    by_active = max(range(len(ranks)), key=lambda rank: sum(map(bool, ranks[rank])))
    tried = dict.fromkeys((*range(min(RANKS_TRIED, len(ranks))), by_active))
    return [ranks[rank] for rank in tried]


def _layer_times(at: Sequence[tuple[str, int]], seconds: Sequence[float]) -> dict[str, float]:
    """Return each placement's seconds of the slowest rank, mean over layers."""
    slowest: dict[str, dict[int, float]] = {}
    for (name, layer), time_s in zip(at, seconds, strict=True):
        layers = slowest.setdefault(name, {})
        layers[layer] = max(time_s, layers.get(layer, 0.0))
    return {name: statistics.fmean(layers.values()) for name, layers in slowest.items()}
