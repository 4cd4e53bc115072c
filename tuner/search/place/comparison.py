"""The current placement, EPLB's and the plan's on the hold-out passes: loads and seconds.

W workloads   P passes   L layers   G ranks
"""

from collections.abc import Sequence
from dataclasses import dataclass

from solvers.placement.ranks import Placement, Ranks
from tuner.costs.place.expert_layer import LayerSeconds
from tuner.plans.place import LayerTimes, WorkloadOutcome
from tuner.search.place.candidates import EplbBaseline
from tuner.search.place.evaluation import Evaluation, evaluate
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.prices import Pricing
from tuner.spec.place_read import PlaceSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlacementComparison:
    """One workload under the current placement, EPLB's, and the plan's."""

    current: Evaluation
    eplb: Evaluation
    planned: Evaluation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedComparison:
    """Seconds of a pass of one workload under the current placement, EPLB's and the plan's."""

    current: LayerSeconds
    eplb: LayerSeconds
    planned: LayerSeconds


def pairs(
    evidence: Sequence[WorkloadEvidence], comparisons: Sequence[PlacementComparison]
) -> list[tuple[WorkloadEvidence, PlacementComparison]]:
    """Return each workload with its comparison."""
    return list(zip(evidence, comparisons, strict=True))


def placement_ranks(spec: PlaceSpec, placement: Placement) -> Ranks:
    """Return the ranks with the slots of a placement: the current one may have others."""
    return spec.current_ranks if placement is spec.current else spec.ranks


def evaluate_workload(
    spec: PlaceSpec, one: WorkloadEvidence, placement: Placement, dispatch: str
) -> Evaluation:
    """Evaluate a placement on the hold-out passes of one workload."""
    return evaluate(
        placement,
        load_PLE=one.holdout_PLE,
        ranks=placement_ranks(spec, placement),
        dispatch=dispatch,
    )


def price_workload(
    spec: PlaceSpec,
    one: WorkloadEvidence,
    placement: Placement,
    evaluation: Evaluation,
    pricing: Pricing,
) -> LayerSeconds:
    """Price a placement on the hold-out passes of one workload."""
    return pricing.price(
        placement,
        evaluation,
        load_PLE=one.holdout_PLE,
        ranks=placement_ranks(spec, placement),
        token_LTK=one.holdout_LTK,
        is_counted=one.is_counted,
    )


def compare_loads(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    chosen: Placement,
    baseline: EplbBaseline,
    dispatch: str,
) -> tuple[PlacementComparison, ...]:
    """Evaluate the current placement, EPLB's and the plan's on every workload."""
    return tuple(
        PlacementComparison(
            current=evaluate_workload(spec, one, spec.current, dispatch),
            eplb=evaluate_workload(spec, one, baseline.placement, dispatch),
            planned=evaluate_workload(spec, one, chosen, dispatch),
        )
        for one in evidence
    )


def to_outcome(
    one: WorkloadEvidence, comparison: PlacementComparison, *, passes_planned_from: int
) -> WorkloadOutcome:
    """Format the comparison of one workload for the plan."""
    return WorkloadOutcome(
        workload=one.name,
        passes_planned_from=passes_planned_from,
        passes_judged=one.num_holdout_passes,
        imbalance_before=comparison.current.imbalance,
        imbalance_rule=comparison.eplb.imbalance,
        imbalance_after=comparison.planned.imbalance,
        pass_before=comparison.current.spread,
        pass_rule=comparison.eplb.spread,
        pass_after=comparison.planned.spread,
    )


def price_comparisons(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    chosen: Placement,
    baseline: EplbBaseline,
    comparisons: Sequence[PlacementComparison],
    pricing: Pricing,
) -> tuple[PricedComparison, ...]:
    """Price the hold-out passes of every workload."""
    return tuple(
        PricedComparison(
            current=price_workload(spec, one, spec.current, comparison.current, pricing),
            eplb=price_workload(spec, one, baseline.placement, comparison.eplb, pricing),
            planned=price_workload(spec, one, chosen, comparison.planned, pricing),
        )
        for one, comparison in pairs(evidence, comparisons)
    )


def to_layer_times(
    evidence: Sequence[WorkloadEvidence], priced: Sequence[PricedComparison], pricing: Pricing
) -> tuple[LayerTimes, ...]:
    """Format the seconds of every workload for the plan."""
    times = []
    low, high = pricing.band
    for one, seconds in zip(evidence, priced, strict=True):
        after_s = float(seconds.planned.pass_P.mean())
        times.append(
            LayerTimes(
                workload=one.name,
                before_s=float(seconds.current.pass_P.mean()),
                rule_s=float(seconds.eplb.pass_P.mean()),
                after_s=after_s,
                after_s_band=(low * after_s, high * after_s),
                experts_after_s=float(seconds.planned.experts_PL.sum(axis=1).mean()),
                exchange_after_s=float(seconds.planned.all_to_all_PL.sum(axis=1).mean()),
                before_layers_s=tuple(seconds.current.layer_L.tolist()),
                after_layers_s=tuple(seconds.planned.layer_L.tolist()),
            )
        )
    return tuple(times)
