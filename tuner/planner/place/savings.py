"""What a plan saves, and what that is uncertain by.

    W workloads   P judged passes

Seconds of the expert layers where they are priced, traffic where that is the objective and nothing
is priced, otherwise the load of the busiest ranks. The noise of several workloads' mean is that of
each, weighted by its share of the cost, added as squares.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from solvers.placement.ranks import Placement
from tuner.planner.place.candidates import Rule
from tuner.planner.place.comparison import Priced, Three
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.links import LinkCosts
from tuner.planner.place.prices import Pricing
from tuner.planner.place.traffic import stretches
from tuner.planner.place.transitions import is_judged_apart
from tuner.planner.place.verdict import noise_of
from tuner.spec.place import Objective
from tuner.spec.place_read import PlaceSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Shares of what there was without the plan."""

    gain_ratio: float
    noise_ratio: float
    step_gain_ratio: float | None
    """Of a whole pass; None where nothing is priced."""
    saved: str
    """What there is less of."""
    rule_gain_ratio: float
    """What EPLB's rule saves of the same."""
    rule_noise_ratio: float
    """What the difference from it is uncertain by, both on the same passes."""


def gain_of_time(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    threes: Sequence[Three],
    priced: Sequence[Priced],
    pricing: Pricing,
) -> Gain:
    """Return the share of the expert layers' seconds that is saved."""
    weights = [one.weight_ratio for one in evidence]
    before = [float(one.before.pass_P.mean()) for one in priced]
    after = [float(one.after.pass_P.mean()) for one in priced]
    noises = [
        noise_of(times.before.pass_P, times.after.pass_P, counted=_counted(one, three))
        for one, three, times in zip(evidence, threes, priced, strict=True)
    ]
    before_s, after_s = np.dot(weights, before), np.dot(weights, after)
    by_rule = [float(one.rule.pass_P.mean()) for one in priced]
    rule_noises = [
        noise_of(times.rule.pass_P, times.after.pass_P, counted=_counted(one, three))
        for one, three, times in zip(evidence, threes, priced, strict=True)
    ]
    rule_s = np.dot(weights, by_rule)
    top_k = pricing.machine.moe.top_k
    # Layers that were not recorded are as uneven as those that were.
    layers = pricing.machine.model.num_moe_layers / len(spec.layer_ids)
    rest_s = sum(
        weight * pricing.whole_pass_s(tokens=float(one.judged_PLE.sum(axis=2).mean()) / top_k)
        for weight, one in zip(weights, evidence, strict=True)
    )
    return Gain(
        gain_ratio=float(1.0 - after_s / before_s),
        noise_ratio=_together(weights, before, noises),
        step_gain_ratio=float(layers * (before_s - after_s) / (rest_s + layers * before_s)),
        saved="time in the expert layers",
        rule_gain_ratio=float(1.0 - rule_s / before_s),
        rule_noise_ratio=float(_together(weights, by_rule, rule_noises) * rule_s / before_s),
    )


def gain_of_load(evidence: Sequence[WorkloadEvidence], threes: Sequence[Three]) -> Gain:
    """Return the share of the busiest ranks' load that is saved."""
    weights = [one.weight_ratio for one in evidence]
    before = [three.before.imbalance for three in threes]
    after = [three.after.imbalance for three in threes]
    by_rule = [three.rule.imbalance for three in threes]
    rule_noises = [
        noise_of(three.rule.imbalance_P, three.after.imbalance_P, counted=_counted(one, three))
        for one, three in zip(evidence, threes, strict=True)
    ]
    of_before = float(np.dot(weights, by_rule) / np.dot(weights, before))
    return Gain(
        gain_ratio=float(1.0 - np.dot(weights, after) / np.dot(weights, before)),
        noise_ratio=_together(weights, before, load_noises(evidence, threes)),
        step_gain_ratio=None,
        saved="for the busiest ranks to do",
        rule_gain_ratio=1.0 - of_before,
        rule_noise_ratio=_together(weights, by_rule, rule_noises) * of_before,
    )


def load_noises(evidence: Sequence[WorkloadEvidence], threes: Sequence[Three]) -> list[float]:
    """Return what each workload's change of load is uncertain by."""
    return [
        noise_of(three.before.imbalance_P, three.after.imbalance_P, counted=_counted(one, three))
        for one, three in zip(evidence, threes, strict=True)
    ]


def gain_of_traffic(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    chosen: Placement,
    traffic: Mapping[str, tuple[float, float, float]],
    rule: Rule,
    links: LinkCosts,
) -> Gain:
    """Return the share of the traffic that is saved; its noise is that of the sampled tokens."""
    before, by_rule, after = traffic[spec.goal.objective.value]
    noise, rule_noise = (
        _traffic_noise(spec, evidence, beside, chosen, rule, links)
        for beside in (spec.current, rule.placement)
    )
    return Gain(
        gain_ratio=1.0 - after / before if before > 0.0 else 0.0,
        noise_ratio=noise,
        step_gain_ratio=None,
        saved="traffic",
        rule_gain_ratio=1.0 - by_rule / before if before > 0.0 else 0.0,
        rule_noise_ratio=rule_noise * by_rule / before if before > 0.0 else 0.0,
    )


def _traffic_noise(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    beside: Placement,
    chosen: Placement,
    rule: Rule,
    links: LinkCosts,
) -> float:
    noises, costs = [], []
    for one in evidence:
        if spec.goal.objective is Objective.LAYER_CHAIN and not is_judged_apart(one):
            noises.append(noise_of(np.ones(1), np.ones(1), counted=_chain_tokens(one)))
            costs.append(1.0)
            continue
        beside_P, after_P = (
            stretches(spec, one, placement, rule, links) for placement in (beside, chosen)
        )
        noises.append(noise_of(beside_P, after_P, counted=math.inf))
        costs.append(float(beside_P.mean()))
    return _together([one.weight_ratio for one in evidence], costs, noises)


def _counted(one: WorkloadEvidence, three: Three) -> float:
    """Recorded token copies on busiest ranks, all judged passes and layers."""
    return float(three.after.copies_PLG.max(axis=2).sum()) * one.recorded_ratio


def _chain_tokens(one: WorkloadEvidence) -> float:
    """Tokens behind the recorded transitions; a token's pairs of choices are not independent."""
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
