"""The gain of a dispatch rule that no engine implements, on the plan's own placement.

It is compared with what engines do without it: replicas drawn token by token where an expert has
several, every token to its expert's rank where it has one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.dynamic import drawn
from solvers.placement.dispatch.least_loaded import LeastLoaded
from solvers.placement.ranks import Floats, Ints, Placement
from tuner.search.place.comparison import PlacementComparison, placement_ranks
from tuner.search.place.evaluation import Evaluation, arrivals, evaluate, evaluate_loads
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.prices import Pricing
from tuner.spec.place import Dispatch
from tuner.spec.place_dispatch import UNLAUNCHED
from tuner.spec.place_read import PlaceSpec
from tuner.units import format_s

_KNOBS: Final = LeastLoaded()

RULES: Final[Mapping[Dispatch, str]] = {
    Dispatch.ACTIVATED: (
        "all tokens of an expert go to one replica, on the rank that reads fewest experts so far"
        " (Janus' scheduler)"
    ),
    Dispatch.LEAST_LOADED: (
        "what a rank has beyond the mean goes to idle ranks with a copy of the expert's weights"
        f" (LLEP: pieces of {_KNOBS.min_chunk_tokens:,.0f} token copies or more, where the"
        f" most-loaded rank has {_KNOBS.gate_ratio:g} times the mean)"
    ),
}
"""What each rule does."""


def dispatch_gain(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    comparisons: Sequence[PlacementComparison],
    pricing: Pricing | None,
    *,
    chosen: Placement,
    others: Sequence[Placement],
) -> Iterator[str]:
    """Describe the goal's rule and its gain, one line each; nothing where an engine has it.

    Args:
        spec: what to plan.
        evidence: hold-out passes are reported, fit passes choose among `others`.
        comparisons: the current placement, EPLB's and the plan's, under the goal's rule.
        pricing: of seconds; None: loads are compared.
        chosen: the plan's placement.
        others: candidates for a runtime without the rule.
    """
    rule = spec.goal.dispatch
    if rule is None or rule not in UNLAUNCHED:
        return
    yield f"{RULES[rule]}; no engine that is written for has the rule {rule.value!r}"
    after = [comparison.planned for comparison in comparisons]
    holdout = [_holdout_passes(one) for one in evidence]
    with_rule = _cost(spec, holdout, after, chosen, pricing)
    fit = [_fit_passes(one) for one in evidence]
    best = min(
        (chosen, *others), key=lambda each: _cost_without_rule(spec, fit, each, rule, pricing)
    )
    without = _cost_without_rule(spec, holdout, best, rule, pricing)
    evaluations = [_without_rule(spec, one, chosen, rule) for one in holdout]
    if pricing is None:
        yield (
            f"a runtime with it would have {with_rule:.3f} times the mean load on its most-loaded"
            f" ranks; without it the best placement found has {without:.3f}"
        )
    else:
        yield (
            f"a runtime with it would take {format_s(with_rule)} in the expert layers of a pass;"
            f" without it the best placement found takes {format_s(without)}"
        )
    weights = np.array([one.weight_ratio for one in evidence])
    if rule is Dispatch.ACTIVATED:
        yield _experts_read(comparisons, evaluations, weights)
    else:
        yield _weights_sent(after, weights, is_priced=pricing is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Passes:
    """Passes of one workload that placements are compared on."""

    weight_ratio: float
    load_PLE: Floats
    token_LTK: Ints | None
    is_counted: bool


def _holdout_passes(one: WorkloadEvidence) -> _Passes:
    return _Passes(
        weight_ratio=one.weight_ratio,
        load_PLE=one.holdout_PLE,
        token_LTK=one.holdout_LTK,
        is_counted=one.is_counted,
    )


def _fit_passes(one: WorkloadEvidence) -> _Passes:
    """Return the passes that a placement for runtimes without the rule is chosen on."""
    return _Passes(
        weight_ratio=one.weight_ratio,
        load_PLE=one.whole_PLE[: one.num_fit_passes] if one.is_split else one.fit_LE[None],
        token_LTK=one.fit_LTK,
        is_counted=one.is_counted,
    )


def _cost_without_rule(
    spec: PlaceSpec,
    passes: Sequence[_Passes],
    placement: Placement,
    rule: Dispatch,
    pricing: Pricing | None,
) -> float:
    """Return the cost of a placement in runtimes without the rule."""
    evaluations = [_without_rule(spec, one, placement, rule) for one in passes]
    return _cost(spec, passes, evaluations, placement, pricing)


def _without_rule(
    spec: PlaceSpec, one: _Passes, placement: Placement, rule: Dispatch
) -> Evaluation:
    """Evaluate the placement in runtimes without the rule."""
    ranks = placement_ranks(spec, placement)
    if rule is Dispatch.LEAST_LOADED:
        return evaluate(placement, load_PLE=one.load_PLE, ranks=ranks, dispatch=Dispatch.EVEN.value)
    case = DispatchCase(load_PLE=arrivals(one.load_PLE), placement=placement, ranks=ranks)
    copies_PLG, read_PLG = drawn(case)
    return evaluate_loads(copies_PLG, ranks=ranks, active_PLG=read_PLG.astype(np.float64))


def _cost(
    spec: PlaceSpec,
    passes: Sequence[_Passes],
    evaluations: Sequence[Evaluation],
    placement: Placement,
    pricing: Pricing | None,
) -> float:
    """Return the seconds of a pass, or the imbalance where nothing is priced; mean of workloads."""
    total = 0.0
    for one, under_rule in zip(passes, evaluations, strict=True):
        if pricing is None:
            total += one.weight_ratio * under_rule.imbalance
            continue
        seconds = pricing.price(
            placement,
            under_rule,
            load_PLE=one.load_PLE,
            ranks=placement_ranks(spec, placement),
            token_LTK=one.token_LTK,
            is_counted=one.is_counted,
        )
        total += one.weight_ratio * float(seconds.pass_P.mean())
    return total


def _experts_read(
    comparisons: Sequence[PlacementComparison], evaluations: Sequence[Evaluation], weights: Floats
) -> str:
    before, eplb, after, without = (
        float(np.dot(weights, [_most_read(one) for one in each]))
        for each in (
            [comparison.current for comparison in comparisons],
            [comparison.eplb for comparison in comparisons],
            [comparison.planned for comparison in comparisons],
            evaluations,
        )
    )
    return (
        f"experts that the most-loaded rank reads in a layer: {before:.2f} before, {eplb:.2f} EPLB,"
        f" {after:.2f} plan; {without:.2f} with replicas drawn token by token"
    )


def _most_read(evaluation: Evaluation) -> float:
    if evaluation.active_PLG is None:
        raise ValueError("the rule does not say which experts are read")
    return float(evaluation.active_PLG.max(axis=2).mean())


def _weights_sent(evaluations: Sequence[Evaluation], weights: Floats, *, is_priced: bool) -> str:
    sent = [
        0.0 if one.weights_PLG is None else one.weights_PLG.max(axis=2).mean()
        for one in evaluations
    ]
    counted = (
        "counted, after the all-to-all and not overlapped with it"
        if is_priced
        else "not counted; name `model` and `cluster` for it"
    )
    return (
        f"the most-loaded rank sends or gets the weights of {float(np.dot(weights, sent)):.2f}"
        f" experts in a layer and pass; their transfer is {counted}"
    )
