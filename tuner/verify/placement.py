"""Measures placements: expert GEMMs with the rows that a recorded pass gives each rank.

    L layers   S slots   G ranks

A layer takes as long as its slowest rank. Of each measured layer the ranks with most rows and the
one with most active experts are run, one after another on the device at hand, and the slowest
counts. All-to-all and the rest of a pass are not measured.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from solvers.placement.ranks import Floats, Ints
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Loads:
    """The loads of one placement to run."""

    layer_N: list[int]
    """Index of the layer of each load."""
    rows_NS: list[list[int]]


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
    names = list(decisions)
    layers = _spread(len(load_LE))
    loads = {name: _loads(decisions[name], load_LE, layers) for name in names}
    device, seconds = time_loads([rows for name in names for rows in loads[name].rows_NS])
    at, measured, predicted = 0, {}, {}
    for name in names:
        count = len(loads[name].rows_NS)
        medians = [statistics.median(times) for times in seconds[at : at + count]]
        at += count
        measured[name] = _slowest(loads[name], medians, layers)
        if price_loads is not None:
            rows = np.array([float(sum(rows)) for rows in loads[name].rows_NS])
            active = np.array([float(sum(map(bool, rows))) for rows in loads[name].rows_NS])
            predicted[name] = _slowest(loads[name], price_loads(rows, active).tolist(), layers)
    mean = {name: statistics.fmean(values) for name, values in measured.items()}
    guess = {name: statistics.fmean(values) for name, values in predicted.items()}
    winner = min(names, key=lambda name: mean[name])
    ids = decisions[names[0]].layer_ids
    return PlaceVerified(
        device=device,
        layers=tuple(ids[layer] for layer in layers),
        trials=tuple(
            PlaceTrial(
                decision=name,
                status="ok",
                predicted_layer_time_s=guess.get(name),
                recalibrated_layer_time_s=_recalibrated(name, mean, guess),
                measured_layer_time_s=mean[name],
                measured_layers_s=tuple(measured[name]),
            )
            for name in names
        ),
        winner=winner,
        regret_ratio=mean[names[0]] / mean[winner] - 1.0,
    )


def rows_LS(decision: PlaceDecision, load_LE: Floats) -> Ints:
    """Rows of every slot: replicas share an expert's rows evenly, the first take the remainder."""
    rows = np.zeros((len(load_LE), decision.num_slots), dtype=np.int64)
    for layer, (load_E, expert_S) in enumerate(
        zip(np.rint(load_LE).astype(np.int64), decision.physical_to_logical, strict=True)
    ):
        slots = np.array(expert_S)
        for expert in range(decision.num_experts):
            replicas = np.flatnonzero(slots == expert)
            share, left = divmod(int(load_E[expert]), len(replicas))
            rows[layer, replicas] = share
            rows[layer, replicas[:left]] += 1
    return rows


def _spread(num_layers: int) -> list[int]:
    count = min(MOST_LAYERS, num_layers)
    return sorted({round(step) for step in np.linspace(0, num_layers - 1, count)})


def _loads(decision: PlaceDecision, load_LE: Floats, layers: Sequence[int]) -> _Loads:
    slots = rows_LS(decision, load_LE)
    boundaries = np.cumsum(decision.slots_per_rank)[:-1]
    layer_N, rows_NS = [], []
    for layer in layers:
        ranks = [part.tolist() for part in np.split(slots[layer], boundaries)]
        by_rows = sorted(range(len(ranks)), key=lambda rank: -sum(ranks[rank]))[:RANKS_TRIED]
        by_active = max(range(len(ranks)), key=lambda rank: sum(map(bool, ranks[rank])))
        for rank in dict.fromkeys((*by_rows, by_active)):
            layer_N.append(layer)
            rows_NS.append(ranks[rank])
    return _Loads(layer_N=layer_N, rows_NS=rows_NS)


def _slowest(loads: _Loads, seconds: Sequence[float], layers: Sequence[int]) -> list[float]:
    return [
        max(one for layer, one in zip(loads.layer_N, seconds, strict=True) if layer == wanted)
        for wanted in layers
    ]


def _recalibrated(
    name: str, measured: Mapping[str, float], predicted: Mapping[str, float]
) -> float | None:
    """Scale a prediction by the median ratio of the other trials."""
    others = [measured[other] / predicted[other] for other in predicted if other != name]
    if name not in predicted or not others:
        return None
    return predicted[name] * statistics.median(others)
