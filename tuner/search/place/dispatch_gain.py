"""The gain of a dispatch rule that no engine implements, on the plan's own placement.

Without it engines draw a replica for each token (`dynamic`): the placement that is best for that on
the fit passes, and the plan's under the rule, are evaluated on the same hold-out passes.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from solvers.placement.dispatch.least_loaded import LeastLoaded
from solvers.placement.ranks import Placement
from tuner.plans.place import PlaceUnlaunchable
from tuner.search.place.comparison import (
    PlacementComparison,
    evaluate_workload,
    price_workload,
)
from tuner.search.place.cost import fit_cost
from tuner.search.place.evaluation import Evaluation
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.prices import Pricing
from tuner.search.settings import WORTH_NAMING_RATIO
from tuner.spec.place import Dispatch
from tuner.spec.place_read import PlaceSpec
from tuner.units import format_s

_KNOBS: Final = LeastLoaded()

RULE: Final = (
    "what a rank has beyond the mean goes to idle ranks with a copy of the expert's weights"
    f" (LLEP: pieces of {_KNOBS.min_chunk_tokens:,.0f} token copies or more, where the"
    f" most-loaded rank has {_KNOBS.gate_ratio:g} times the mean)"
)
"""Description of least-loaded dispatch in one sentence."""


def dispatch_gain(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    comparisons: Sequence[PlacementComparison],
    pricing: Pricing | None,
    *,
    chosen: Placement,
    candidates: Sequence[Placement],
) -> tuple[tuple[PlaceUnlaunchable, ...], tuple[str, ...]]:
    """Return the goal's rule with its gain, and notes on what it does; nothing if an engine has it.

    The rule is left out where it gains too little to be named.

    Args:
        spec: what to plan.
        evidence: fit passes choose among `candidates`, hold-out passes are compared.
        comparisons: of the hold-out passes, under the goal's rule.
        pricing: of seconds, compared whatever the objective; None: loads are compared.
        chosen: the plan's placement.
        candidates: for a runtime without the rule, the plan's placement among them.
    """
    rule = spec.goal.dispatch
    if rule is not Dispatch.LEAST_LOADED:
        return (), ()
    launched = Dispatch.DYNAMIC.value
    best = min(candidates, key=lambda each: fit_cost(spec, evidence, each, pricing, launched))
    weights = [one.weight_ratio for one in evidence]
    under = [
        [comparison.planned for comparison in comparisons],
        [evaluate_workload(spec, one, best, launched) for one in evidence],
    ]
    taken, without = (
        float(np.dot(weights, _pass_costs(spec, evidence, placement, evaluations, pricing)))
        for placement, evaluations in zip((chosen, best), under, strict=True)
    )
    shown = [
        f"{cost:.3f} times the mean load on the most-loaded ranks"
        if pricing is None
        else f"{format_s(cost)} in the expert layers of a pass"
        for cost in (taken, without)
    ]
    feature = f"dispatch {rule.value}: {RULE}; no engine that is written for has it"
    lacking = PlaceUnlaunchable(feature=feature, gain_ratio=1.0 - taken / without)
    return (lacking,) * (lacking.gain_ratio > WORTH_NAMING_RATIO), (
        f"with the rule {rule.value!r}: {shown[0]}; without it, on the best placement found:"
        f" {shown[1]}",
        _weights_sent(evidence, comparisons, is_priced=pricing is not None),
    )


def _pass_costs(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    evaluations: Sequence[Evaluation],
    pricing: Pricing | None,
) -> list[float]:
    """Return each workload's mean hold-out pass: seconds, or imbalance where nothing is priced."""
    if pricing is None:
        return [one.imbalance for one in evaluations]
    return [
        float(price_workload(spec, one, placement, evaluation, pricing).pass_P.mean())
        for one, evaluation in zip(evidence, evaluations, strict=True)
    ]


def _weights_sent(
    evidence: Sequence[WorkloadEvidence],
    comparisons: Sequence[PlacementComparison],
    *,
    is_priced: bool,
) -> str:
    sent = sum(
        one.weight_ratio * float(comparison.planned.weights_PLG.max(axis=2).mean())
        for one, comparison in zip(evidence, comparisons, strict=True)
        if comparison.planned.weights_PLG is not None
    )
    counted = (
        "counted, after the all-to-all and not overlapped with it"
        if is_priced
        else "not counted; name `model` and `cluster` for it"
    )
    return (
        f"the most-loaded rank sends or gets the weights of {sent:.2f}"
        f" experts in a layer and pass; their transfer is {counted}"
    )
