"""Savings of a plan, with their uncertainty.

    W workloads   P hold-out passes

Savings are in seconds of the expert layers where they are priced, in traffic where that is the
objective and nothing is priced, otherwise in load of the most-loaded ranks. The noise of the
workloads' mean is the root sum of squares, each weighted by its share of the cost; under static
dispatch, where all workloads run on one launch's tables, it is the sum.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from solvers.placement.ranks import Floats, Placement
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
    """Share of a whole pass's seconds that is saved; None where nothing is priced."""
    saved: str
    """Name of the saved quantity, e.g. "time in the expert layers"."""
    eplb_gain_ratio: float
    """Share of the cost that EPLB's rule saves."""
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
    costs = [(one.current.pass_P, one.eplb.pass_P, one.planned.pass_P) for one in priced]
    gain = _gain(evidence, costs, _samples(evidence, comparisons), "time in the expert layers")
    before_s = sum(
        one.weight_ratio * float(current_P.mean())
        for one, (current_P, _, _) in zip(evidence, costs, strict=True)
    )
    top_k = pricing.machine.moe.computed_top_k
    # Assume that layers without a recording are as imbalanced as the recorded ones.
    layers = pricing.machine.model.num_moe_layers / len(spec.layer_ids)
    rest_s = sum(
        one.weight_ratio
        * pricing.whole_pass_s(tokens=float(one.holdout_PLE.sum(axis=2).mean()) / top_k)
        for one in evidence
    )
    saved_s = layers * gain.gain_ratio * before_s
    return replace(gain, step_gain_ratio=saved_s / (rest_s + layers * before_s))


def load_gain(
    evidence: Sequence[WorkloadEvidence], comparisons: Sequence[PlacementComparison]
) -> Gain:
    """Return the share of the most-loaded ranks' load that is saved."""
    costs = [
        (one.current.imbalance_P, one.eplb.imbalance_P, one.planned.imbalance_P)
        for one in comparisons
    ]
    return _gain(evidence, costs, _samples(evidence, comparisons), "load on the most-loaded ranks")


def load_noises(
    evidence: Sequence[WorkloadEvidence], comparisons: Sequence[PlacementComparison]
) -> list[float]:
    """Return the uncertainty of each workload's change of load."""
    return [
        gain_noise(one.current.imbalance_P, one.planned.imbalance_P, counted=events, launches=times)
        for one, (events, times) in zip(comparisons, _samples(evidence, comparisons), strict=True)
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
    costs, samples = [], []
    for one in evidence:
        is_summed = spec.goal.objective is Objective.LAYER_CHAIN and not has_holdout_transitions(
            one
        )
        samples.append((_chain_tokens(one) if is_summed else math.inf, 1))
        current_P, eplb_P, after_P = (
            np.ones(1) if is_summed else batch_traffic(spec, one, placement, baseline, links)
            for placement in (spec.current, baseline.placement, chosen)
        )
        costs.append((current_P, eplb_P, after_P))
    return _gain(evidence, costs, samples, "traffic", totals=traffic[spec.goal.objective.value])


def _gain(
    evidence: Sequence[WorkloadEvidence],
    costs: Sequence[tuple[Floats, Floats, Floats]],
    samples: Sequence[tuple[float, int]],
    saved: str,
    *,
    totals: tuple[float, float, float] | None = None,
) -> Gain:
    """Compare the costs of hold-out passes under the current placement, EPLB's and the plan's.

    Args:
        evidence: every workload.
        costs: of each pass of each workload, under the three placements.
        samples: recorded events and launches of each workload, `verdict.gain_noise`.
        saved: what is saved, in words.
        totals: the three costs over all workloads; None: the weighted means of `costs`.
    """
    weights = [one.weight_ratio for one in evidence]
    means = [[float(cost_P.mean()) for cost_P in each] for each in zip(*costs, strict=True)]
    before, eplb, after = totals or (float(np.dot(weights, each)) for each in means)
    noise, eplb_noise = (
        _together(
            weights,
            means[place],
            [
                gain_noise(each[place], each[2], counted=events, launches=times)
                for each, (events, times) in zip(costs, samples, strict=True)
            ],
            is_shared=any(times > 1 for _, times in samples),
        )
        for place in (0, 1)
    )
    eplb_share = eplb / before if before > 0.0 else 0.0
    return Gain(
        gain_ratio=1.0 - after / before if before > 0.0 else 0.0,
        noise_ratio=noise,
        step_gain_ratio=None,
        saved=saved,
        eplb_gain_ratio=1.0 - eplb_share if before > 0.0 else 0.0,
        eplb_noise_ratio=eplb_noise * eplb_share,
    )


def _samples(
    evidence: Sequence[WorkloadEvidence], comparisons: Sequence[PlacementComparison]
) -> list[tuple[float, int]]:
    """Recorded token copies on most-loaded ranks, all hold-out passes and layers, and launches."""
    return [
        (
            float(comparison.planned.copies_PLG.max(axis=2).sum(axis=1).mean())
            * len(one.holdout_PLE)
            * one.recorded_ratio,
            comparison.planned.num_launches,
        )
        for one, comparison in zip(evidence, comparisons, strict=True)
    ]


def _chain_tokens(one: WorkloadEvidence) -> float:
    """Number of tokens in the recorded transitions; pairs of one token are not independent."""
    flow_MEE = one.recording.transition_MEE
    if flow_MEE is None:
        raise ValueError(f"{one.name!r} holds no transitions")
    chosen = one.recording.top_k or 1
    pairs = {"all_pairs": chosen**2, "rank_aligned": chosen}.get(one.recording.transition_kind, 1)
    return float(flow_MEE.sum(axis=(1, 2)).mean()) / pairs


def _together(
    weights: Sequence[float], costs: Sequence[float], noises: Sequence[float], *, is_shared: bool
) -> float:
    """Return the noise of the mean; `is_shared`: of noises that rise and fall together."""
    shares = np.array(weights) * np.array(costs)
    total = float(shares.sum())
    return float(np.linalg.norm(shares * noises, 1 if is_shared else 2)) / total if total else 0.0
