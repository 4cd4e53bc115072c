"""What a runtime would gain by a dispatch rule that no engine has, on the plan's own placement.

Beside it stands the rule that engines come nearest to without it: replicas drawn token by token
where experts have several, every token at its expert's home where they have one.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.dynamic import drawn
from solvers.placement.dispatch.least_loaded import LeastLoaded
from solvers.placement.ranks import Floats, Placement
from tuner.planner.place.comparing import Three, judge_workload
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.judging import Judged, whole_tokens
from tuner.planner.place.pricing import Pricing
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
    chosen: Placement,
    threes: Sequence[Three],
    pricing: Pricing | None,
) -> Iterator[str]:
    """Say what the goal's rule is and gains, a line each; nothing where an engine has it."""
    rule = spec.goal.dispatch
    if rule is None or rule not in UNLAUNCHED:
        return
    yield f"{RULES[rule]}; no engine that is written for has the rule {rule.value!r}"
    weights = np.array([one.weight_ratio for one in evidence])
    usual = [_usual(spec, one, chosen, rule) for one in evidence]
    judged = [three.after for three in threes]
    if pricing is None:
        with_rule, without = (
            float(np.dot(weights, [one.imbalance for one in each])) for each in (judged, usual)
        )
        yield (
            f"a runtime with it would have {with_rule:.3f} of the mean load on its busiest ranks,"
            f" {without:.3f} without"
        )
    else:
        with_s, without_s = (
            float(np.dot(weights, [_pass_s(spec, *pair, chosen, pricing) for pair in pairs]))
            for pairs in (
                list(zip(evidence, judged, strict=True)),
                list(zip(evidence, usual, strict=True)),
            )
        )
        yield (
            f"a runtime with it would take {format_s(with_s)} in the expert layers of a pass,"
            f" {format_s(without_s)} without"
        )
    if rule is Dispatch.ACTIVATED:
        yield _experts_read(threes, usual, weights)
    else:
        yield _weights_sent(judged, weights, is_priced=pricing is not None)


def _usual(spec: PlaceSpec, one: WorkloadEvidence, chosen: Placement, rule: Dispatch) -> Judged:
    """Judge the placement under what runtimes do without the rule."""
    if rule is Dispatch.LEAST_LOADED:
        return judge_workload(spec, one, chosen, Dispatch.EVEN.value)
    load_PLE = whole_tokens(one.judged_PLE)
    case = DispatchCase(load_PLE=load_PLE, placement=chosen, ranks=spec.ranks)
    copies_PLG, read_PLG = drawn(case)
    time_PLG = copies_PLG / spec.ranks.speed_G
    mean_PL = copies_PLG.sum(axis=2) / spec.ranks.speed_G.sum()
    some_PL = np.where(mean_PL > 0.0, mean_PL, 1.0)
    return Judged(
        copies_PLG=copies_PLG,
        ratio_PL=time_PLG.max(axis=2) / some_PL,
        imbalance_P=time_PLG.max(axis=2).sum(axis=1) / some_PL.sum(axis=1),
        active_PLG=read_PLG,
    )


def _pass_s(
    spec: PlaceSpec,
    one: WorkloadEvidence,
    judged: Judged,
    chosen: Placement,
    pricing: Pricing,
) -> float:
    seconds = pricing.price(
        chosen,
        judged,
        load_PLE=one.judged_PLE,
        ranks=spec.ranks,
        token_LTK=one.judged_LTK,
        is_counted=one.is_counted,
    )
    return float(seconds.pass_P.mean())


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
