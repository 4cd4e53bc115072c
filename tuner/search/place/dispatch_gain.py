"""The gain of a dispatch rule that no engine implements, on the plan's own placement.

Without it engines draw a replica for each token (`dynamic`): both are scored as candidates are.
"""

from collections.abc import Sequence
from typing import Final

from solvers.placement.dispatch.least_loaded import LeastLoaded
from solvers.placement.ranks import Placement
from tuner.plans.place import PlaceUnlaunchable
from tuner.search.place.comparison import (
    PlacementComparison,
)
from tuner.search.place.cost import fit_cost
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.prices import Pricing
from tuner.search.settings import WORTH_NAMING_RATIO
from tuner.spec.place import Dispatch, Objective
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
        evidence: whose fit passes are compared, as candidates are.
        comparisons: of the hold-out passes, for the weights that move.
        pricing: of seconds; None: loads are compared.
        chosen: the plan's placement.
        candidates: for a runtime without the rule, the plan's placement among them.
    """
    rule = spec.goal.dispatch
    if rule is not Dispatch.LEAST_LOADED:
        return (), ()
    taken = fit_cost(spec, evidence, chosen, pricing, rule.value)
    without = min(
        fit_cost(spec, evidence, each, pricing, Dispatch.DYNAMIC.value) for each in candidates
    )
    shown = [
        f"{cost:.3f} times the mean load on the most-loaded ranks"
        if spec.goal.objective is not Objective.LAYER_TIME
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
