"""What a runtime would gain by a dispatch rule that no engine has, on the plan's own placement.

Beside it stands the rule that engines come nearest to without it: replicas drawn token by token
where experts have several, every token at its expert's home where they have one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.dynamic import drawn
from solvers.placement.dispatch.least_loaded import LeastLoaded
from solvers.placement.ranks import Floats, Ints, Placement
from tuner.planner.place.comparison import Three, ranks_of
from tuner.planner.place.evaluation import Judged, arrivals, judge, judged_of
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.prices import Pricing
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
        f" (LLEP: pieces of {_KNOBS.min_chunk_tokens:,.0f} token copies or more, where the busiest"
        f" rank has {_KNOBS.gate_ratio:g} times the mean)"
    ),
}
"""What they do, in a line."""


def dispatch_gain(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    threes: Sequence[Three],
    pricing: Pricing | None,
    *,
    chosen: Placement,
    others: Sequence[Placement],
) -> Iterator[str]:
    """Say what the goal's rule is and gains, a line each; nothing where an engine has it.

    Args:
        spec: the question.
        evidence: judged passes are reported, planned ones choose among `others`.
        threes: what runs, EPLB's rule and the plan, under the goal's rule.
        pricing: of seconds; None: loads are compared.
        chosen: the plan's placement.
        others: that a runtime without the rule may rather have.
    """
    rule = spec.goal.dispatch
    if rule is None or rule not in UNLAUNCHED:
        return
    yield f"{RULES[rule]}; no engine that is written for has the rule {rule.value!r}"
    after = [three.after for three in threes]
    judged = [_judged_passes(one) for one in evidence]
    with_rule = _cost(spec, judged, after, chosen, pricing)
    planned = [_planned_passes(one) for one in evidence]
    rather = min(
        (chosen, *others), key=lambda each: _usual_cost(spec, planned, each, rule, pricing)
    )
    without = _usual_cost(spec, judged, rather, rule, pricing)
    usual = [_usual(spec, one, chosen, rule) for one in judged]
    if pricing is None:
        yield (
            f"a runtime with it would have {with_rule:.3f} times the mean load on its busiest"
            f" ranks; without it the best placement found has {without:.3f}"
        )
    else:
        yield (
            f"a runtime with it would take {format_s(with_rule)} in the expert layers of a pass;"
            f" without it the best placement found takes {format_s(without)}"
        )
    weights = np.array([one.weight_ratio for one in evidence])
    if rule is Dispatch.ACTIVATED:
        yield _experts_read(threes, usual, weights)
    else:
        yield _weights_sent(after, weights, is_priced=pricing is not None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Passes:
    """Passes of one workload that placements are compared on."""

    weight_ratio: float
    load_PLE: Floats
    token_LTK: Ints | None
    is_counted: bool


def _judged_passes(one: WorkloadEvidence) -> _Passes:
    return _Passes(
        weight_ratio=one.weight_ratio,
        load_PLE=one.judged_PLE,
        token_LTK=one.judged_LTK,
        is_counted=one.is_counted,
    )


def _planned_passes(one: WorkloadEvidence) -> _Passes:
    """Return what a placement for runtimes without the rule is chosen on."""
    return _Passes(
        weight_ratio=one.weight_ratio,
        load_PLE=one.whole_PLE[: one.planned_passes] if one.is_split else one.planned_LE[None],
        token_LTK=one.planned_LTK,
        is_counted=one.is_counted,
    )


def _usual_cost(
    spec: PlaceSpec,
    passes: Sequence[_Passes],
    placement: Placement,
    rule: Dispatch,
    pricing: Pricing | None,
) -> float:
    """Return the cost of a placement under what runtimes do without the rule."""
    usual = [_usual(spec, one, placement, rule) for one in passes]
    return _cost(spec, passes, usual, placement, pricing)


def _usual(spec: PlaceSpec, one: _Passes, placement: Placement, rule: Dispatch) -> Judged:
    """Judge the placement under what runtimes do without the rule."""
    ranks = ranks_of(spec, placement)
    if rule is Dispatch.LEAST_LOADED:
        return judge(placement, load_PLE=one.load_PLE, ranks=ranks, dispatch=Dispatch.EVEN.value)
    case = DispatchCase(load_PLE=arrivals(one.load_PLE), placement=placement, ranks=ranks)
    copies_PLG, read_PLG = drawn(case)
    return judged_of(copies_PLG, ranks=ranks, active_PLG=read_PLG.astype(np.float64))


def _cost(
    spec: PlaceSpec,
    passes: Sequence[_Passes],
    judged: Sequence[Judged],
    placement: Placement,
    pricing: Pricing | None,
) -> float:
    """Return the seconds of a pass, or the imbalance where nothing is priced; mean of workloads."""
    total = 0.0
    for one, under_rule in zip(passes, judged, strict=True):
        if pricing is None:
            total += one.weight_ratio * under_rule.imbalance
            continue
        seconds = pricing.price(
            placement,
            under_rule,
            load_PLE=one.load_PLE,
            ranks=ranks_of(spec, placement),
            token_LTK=one.token_LTK,
            is_counted=one.is_counted,
        )
        total += one.weight_ratio * float(seconds.pass_P.mean())
    return total


def _experts_read(threes: Sequence[Three], usual: Sequence[Judged], weights: Floats) -> str:
    before, by_rule, after, without = (
        float(np.dot(weights, [_most_read(one) for one in each]))
        for each in (
            [three.before for three in threes],
            [three.rule for three in threes],
            [three.after for three in threes],
            usual,
        )
    )
    return (
        f"experts that the busiest rank reads in a layer: {before:.2f} before, {by_rule:.2f} EPLB,"
        f" {after:.2f} plan; {without:.2f} with replicas drawn token by token"
    )


def _most_read(judged: Judged) -> float:
    if judged.active_PLG is None:
        raise ValueError("the rule does not say which experts are read")
    return float(judged.active_PLG.max(axis=2).mean())


def _weights_sent(judged: Sequence[Judged], weights: Floats, *, is_priced: bool) -> str:
    sent = [
        0.0 if one.weights_PLG is None else one.weights_PLG.max(axis=2).mean() for one in judged
    ]
    counted = (
        "counted, after and not beside the exchange of tokens"
        if is_priced
        else "not counted; name `model` and `cluster` for it"
    )
    return (
        f"the busiest rank sends or gets the weights of {float(np.dot(weights, sent)):.2f} experts"
        f" in a layer and pass; their transfer is {counted}"
    )
