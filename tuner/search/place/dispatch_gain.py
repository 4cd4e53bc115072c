"""The gain of a dispatch rule that no engine implements, on the plan's own placement.

Without it engines draw a replica for each token (`dynamic`): the best placement for that is scored,
evaluated and priced as placements are under every other rule.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from solvers.placement.dispatch.least_loaded import LeastLoaded
from solvers.placement.ranks import Floats, Placement
from tuner.search.place.comparison import (
    PlacementComparison,
    evaluate_workload,
    price_workload,
)
from tuner.search.place.cost import fit_cost
from tuner.search.place.evaluation import Evaluation
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
    launched = Dispatch.DYNAMIC.value
    best = min(
        (chosen, *others), key=lambda each: fit_cost(spec, evidence, each, pricing, launched)
    )
    after = [comparison.planned for comparison in comparisons]
    without = [evaluate_workload(spec, one, best, launched) for one in evidence]
    weights = np.array([one.weight_ratio for one in evidence])
    if pricing is None:
        loads = [np.dot(weights, [one.imbalance for one in each]) for each in (after, without)]
        yield (
            f"a runtime with it would have {loads[0]:.3f} times the mean load on its most-loaded"
            f" ranks; without it the best placement found has {loads[1]:.3f}"
        )
    else:
        seconds = [
            sum(
                one.weight_ratio
                * float(price_workload(spec, one, placement, under, pricing).pass_P.mean())
                for one, under in zip(evidence, each, strict=True)
            )
            for placement, each in ((chosen, after), (best, without))
        ]
        yield (
            f"a runtime with it would take {format_s(seconds[0])} in the expert layers of a pass;"
            f" without it the best placement found takes {format_s(seconds[1])}"
        )
    if rule is Dispatch.ACTIVATED:
        yield _experts_read(comparisons, weights)
    else:
        yield _weights_sent(after, weights, is_priced=pricing is not None)


def _experts_read(comparisons: Sequence[PlacementComparison], weights: Floats) -> str:
    before, eplb, after = (
        float(np.dot(weights, [_most_read(one) for one in each]))
        for each in zip(*((one.current, one.eplb, one.planned) for one in comparisons), strict=True)
    )
    return (
        f"experts that the most-loaded rank reads in a layer: {before:.2f} before, {eplb:.2f} EPLB,"
        f" {after:.2f} plan"
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
