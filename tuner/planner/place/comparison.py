"""The plan beside what runs today and beside EPLB's rule, on judged passes: loads and seconds.

W workloads   P passes   L layers   G ranks
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from solvers.placement.ranks import Floats, Placement, Ranks
from tuner.costs.expert_layer import LayerSeconds
from tuner.place_plan import LayerTimes, WorkloadOutcome
from tuner.planner.place.candidates import Rule
from tuner.planner.place.evaluation import Judged, judge
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.prices import Pricing
from tuner.spec.place_read import PlaceSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Three:
    """One workload under what runs, the rule, and the plan."""

    before: Judged
    rule: Judged
    after: Judged


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Priced:
    """The same in seconds."""

    before: LayerSeconds
    rule: LayerSeconds
    after: LayerSeconds


def pairs(
    evidence: Sequence[WorkloadEvidence], threes: Sequence[Three]
) -> list[tuple[WorkloadEvidence, Three]]:
    """Return each workload with its judgement."""
    return list(zip(evidence, threes, strict=True))


def ranks_of(spec: PlaceSpec, placement: Placement) -> Ranks:
    """Return the ranks with the slots of a placement: what runs may have others."""
    return spec.current_ranks if placement is spec.current else spec.ranks


def judge_workload(
    spec: PlaceSpec, one: WorkloadEvidence, placement: Placement, dispatch: str
) -> Judged:
    """Judge a placement on the judged passes of one workload."""
    return judge(
        placement,
        load_PLE=one.judged_PLE,
        ranks=ranks_of(spec, placement),
        dispatch=dispatch,
        source_HLE=sources_of(spec, one),
    )


def sources_of(spec: PlaceSpec, one: WorkloadEvidence) -> Floats | None:
    """Token copies by source rank, where as many ranks were recorded as are planned for."""
    source_SLE = one.recording.source_SLE
    if source_SLE is None or len(source_SLE) != spec.ranks.num_ranks:
        return None
    return source_SLE.astype(np.float64)


def judged_threes(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    chosen: Placement,
    rule: Rule,
    dispatch: str,
) -> tuple[Three, ...]:
    """Judge what runs, the rule and the plan on every workload."""
    return tuple(
        Three(
            before=judge_workload(spec, one, spec.current, dispatch),
            rule=judge_workload(spec, one, rule.placement, dispatch),
            after=judge_workload(spec, one, chosen, dispatch),
        )
        for one in evidence
    )


def outcome_of(one: WorkloadEvidence, three: Three, *, passes_planned_from: int) -> WorkloadOutcome:
    """Tell one workload before and after."""
    return WorkloadOutcome(
        workload=one.name,
        passes_planned_from=passes_planned_from,
        passes_judged=one.judged_passes,
        imbalance_before=three.before.imbalance,
        imbalance_rule=three.rule.imbalance,
        imbalance_after=three.after.imbalance,
        pass_before=three.before.spread,
        pass_rule=three.rule.spread,
        pass_after=three.after.spread,
    )


def priced_threes(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    chosen: Placement,
    rule: Rule,
    threes: Sequence[Three],
    pricing: Pricing,
) -> tuple[Priced, ...]:
    """Price the judged passes of every workload."""

    def price(one: WorkloadEvidence, placement: Placement, judged: Judged) -> LayerSeconds:
        return pricing.price(
            placement,
            judged,
            load_PLE=one.judged_PLE,
            ranks=ranks_of(spec, placement),
            token_LTK=one.judged_LTK,
            is_counted=one.is_counted,
        )

    return tuple(
        Priced(
            before=price(one, spec.current, three.before),
            rule=price(one, rule.placement, three.rule),
            after=price(one, chosen, three.after),
        )
        for one, three in pairs(evidence, threes)
    )


def layer_times_of(
    evidence: Sequence[WorkloadEvidence], priced: Sequence[Priced], pricing: Pricing
) -> tuple[LayerTimes, ...]:
    """Tell the seconds of every workload."""
    times = []
    low, high = pricing.band
    for one, seconds in zip(evidence, priced, strict=True):
        after_s = float(seconds.after.pass_P.mean())
        times.append(
            LayerTimes(
                workload=one.name,
                before_s=float(seconds.before.pass_P.mean()),
                rule_s=float(seconds.rule.pass_P.mean()),
                after_s=after_s,
                after_s_band=(low * after_s, high * after_s),
                experts_after_s=float(seconds.after.experts_PL.sum(axis=1).mean()),
                exchange_after_s=float(seconds.after.exchange_PL.sum(axis=1).mean()),
                before_layers_s=tuple(seconds.before.layer_L.tolist()),
                after_layers_s=tuple(seconds.after.layer_L.tolist()),
            )
        )
    return tuple(times)
