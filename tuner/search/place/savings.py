"""What a plan saves, with its uncertainty.

    W workloads   P hold-out passes

Savings are in seconds of the expert layers where they are priced, in traffic where that is the
objective and nothing is priced, otherwise in load of the most-loaded ranks. The noise of the
workloads' mean is the root sum of squares, each weighted by its share of the cost.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from solvers.placement.ranks import Placement
from tuner.search.place.candidates import EplbBaseline
from tuner.search.place.comparison import PlacementComparison, PricedComparison
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.links import LinkCosts
from tuner.search.place.prices import Pricing
from tuner.search.place.traffic import batch_traffic
from tuner.search.place.transitions import has_holdout_transitions
from tuner.search.place.verdict import gain_noise
from tuner.spec.place import Objective
from tuner.spec.place_read import PlaceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Shares of the cost without the plan."""

    gain_ratio: float
    noise_ratio: float
    step_gain_ratio: float | None
    """Of a whole pass; None where nothing is priced."""
    saved: str
    """What is saved, in words."""
    eplb_gain_ratio: float
    """What EPLB's rule saves."""
    eplb_noise_ratio: float
    """Uncertainty of the difference from it, both on the same passes."""


def time_gain(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    comparisons: Sequence[PlacementComparison],
    priced: Sequence[PricedComparison],
    pricing: Pricing,
) -> Gain:
    """Return the share of the expert layers' seconds that is saved."""
    weights = [one.weight_ratio for one in evidence]
    before = [float(one.current.pass_P.mean()) for one in priced]
    after = [float(one.planned.pass_P.mean()) for one in priced]
    noises = [
        gain_noise(times.current.pass_P, times.planned.pass_P, counted=_counted(one, comparison))
        for one, comparison, times in zip(evidence, comparisons, priced, strict=True)
    ]
    before_s, after_s = np.dot(weights, before), np.dot(weights, after)
    eplb = [float(one.eplb.pass_P.mean()) for one in priced]
    eplb_noises = [
        gain_noise(times.eplb.pass_P, times.planned.pass_P, counted=_counted(one, comparison))
        for one, comparison, times in zip(evidence, comparisons, priced, strict=True)
    ]
    eplb_s = np.dot(weights, eplb)
    top_k = pricing.machine.moe.computed_top_k
    # Assume that layers without a recording are as imbalanced as the recorded ones.
    layers = pricing.machine.model.num_moe_layers / len(spec.layer_ids)
    rest_s = sum(
        weight * pricing.whole_pass_s(tokens=float(one.holdout_PLE.sum(axis=2).mean()) / top_k)
        for weight, one in zip(weights, evidence, strict=True)
    )
    return Gain(
        gain_ratio=float(1.0 - after_s / before_s),
        noise_ratio=_together(weights, before, noises),
        step_gain_ratio=float(layers * (before_s - after_s) / (rest_s + layers * before_s)),
        saved="time in the expert layers",
        eplb_gain_ratio=float(1.0 - eplb_s / before_s),
        eplb_noise_ratio=float(_together(weights, eplb, eplb_noises) * eplb_s / before_s),
    )


def load_gain(
    evidence: Sequence[WorkloadEvidence], comparisons: Sequence[PlacementComparison]
) -> Gain:
    """Return the share of the most-loaded ranks' load that is saved."""
    weights = [one.weight_ratio for one in evidence]
    before = [comparison.current.imbalance for comparison in comparisons]
    after = [comparison.planned.imbalance for comparison in comparisons]
    eplb = [comparison.eplb.imbalance for comparison in comparisons]
    eplb_noises = [
        gain_noise(
            comparison.eplb.imbalance_P,
            comparison.planned.imbalance_P,
            counted=_counted(one, comparison),
        )
        for one, comparison in zip(evidence, comparisons, strict=True)
    ]
    eplb_share = float(np.dot(weights, eplb) / np.dot(weights, before))
    return Gain(
        gain_ratio=float(1.0 - np.dot(weights, after) / np.dot(weights, before)),
        noise_ratio=_together(weights, before, load_noises(evidence, comparisons)),
        step_gain_ratio=None,
        saved="load on the most-loaded ranks",
        eplb_gain_ratio=1.0 - eplb_share,
        eplb_noise_ratio=_together(weights, eplb, eplb_noises) * eplb_share,
    )


def load_noises(
    evidence: Sequence[WorkloadEvidence], comparisons: Sequence[PlacementComparison]
) -> list[float]:
    """Return the uncertainty of each workload's change of load."""
    return [
        gain_noise(
            comparison.current.imbalance_P,
            comparison.planned.imbalance_P,
            counted=_counted(one, comparison),
        )
        for one, comparison in zip(evidence, comparisons, strict=True)
    ]


def traffic_gain(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    chosen: Placement,
    traffic: Mapping[str, tuple[float, float, float]],
    baseline: EplbBaseline,
    links: LinkCosts,
) -> Gain:
    """Return the share of the traffic that is saved; its noise is that of the sampled tokens."""
    before, eplb, after = traffic[spec.goal.objective.value]
    noise, eplb_noise = (
        _traffic_noise(spec, evidence, beside, chosen, baseline, links)
        for beside in (spec.current, baseline.placement)
    )
    return Gain(
        gain_ratio=1.0 - after / before if before > 0.0 else 0.0,
        noise_ratio=noise,
        step_gain_ratio=None,
        saved="traffic",
        eplb_gain_ratio=1.0 - eplb / before if before > 0.0 else 0.0,
        eplb_noise_ratio=eplb_noise * eplb / before if before > 0.0 else 0.0,
    )


def _traffic_noise(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    beside: Placement,
    chosen: Placement,
    baseline: EplbBaseline,
    links: LinkCosts,
) -> float:
    noises, costs = [], []
    for one in evidence:
        if spec.goal.objective is Objective.LAYER_CHAIN and not has_holdout_transitions(one):
            noises.append(gain_noise(np.ones(1), np.ones(1), counted=_chain_tokens(one)))
            costs.append(1.0)
            continue
        beside_P, after_P = (
            batch_traffic(spec, one, placement, baseline, links) for placement in (beside, chosen)
        )
        noises.append(gain_noise(beside_P, after_P, counted=math.inf))
        costs.append(float(beside_P.mean()))
    return _together([one.weight_ratio for one in evidence], costs, noises)


def _counted(one: WorkloadEvidence, comparison: PlacementComparison) -> float:
    """Recorded token copies on most-loaded ranks, all hold-out passes and layers."""
    return float(comparison.planned.copies_PLG.max(axis=2).sum()) * one.recorded_ratio


def _chain_tokens(one: WorkloadEvidence) -> float:
    """Number of tokens in the recorded transitions; pairs of one token are not independent."""
    flow_MEE = one.recording.transition_MEE
    if flow_MEE is None:
        raise ValueError(f"{one.name!r} holds no transitions")
    chosen = one.recording.top_k or 1
    pairs = {"all_pairs": chosen**2, "rank_aligned": chosen}.get(one.recording.transition_kind, 1)
    return float(flow_MEE.sum(axis=(1, 2)).mean()) / pairs


def _together(weights: Sequence[float], costs: Sequence[float], noises: Sequence[float]) -> float:
    shares = np.array(weights) * np.array(costs)
    total = float(shares.sum())
    return float(np.sqrt(np.square(shares / total * np.array(noises)).sum())) if total else 0.0
