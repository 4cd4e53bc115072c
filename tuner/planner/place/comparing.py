"""The plan beside what runs today and beside EPLB's rule: loads, seconds, unseen workloads, gain.

W workloads   P passes   L layers   G ranks
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from solvers.placement.chain import check as chain_check
from solvers.placement.coactivation import check as coactivation_check
from solvers.placement.ranks import Floats, Placement
from tuner.place_plan import LayerTimes, LeftOut, WorkloadOutcome
from tuner.planner.place.candidates import (
    TRAFFIC,
    Rule,
    chain_problem,
    coactivation_problem,
    migration_limit,
    rule_of,
    solve_objective,
)
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.judging import Judged, judge
from tuner.planner.place.pricing import Pricing
from tuner.planner.place.verdict import noise_of
from tuner.spec.place import Objective
from tuner.spec.place_read import PlaceSpec

MOST_FOLDS: Final = 12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Three:
    """One workload under what runs, the rule, and the plan."""

    before: Judged
    rule: Judged
    after: Judged


def pairs(
    evidence: Sequence[WorkloadEvidence], threes: Sequence[Three]
) -> list[tuple[WorkloadEvidence, Three]]:
    """Return each workload with its judgement."""
    return list(zip(evidence, threes, strict=True))


def judge_workload(
    spec: PlaceSpec, one: WorkloadEvidence, placement: Placement, dispatch: str
) -> Judged:
    """Judge a placement on the judged passes of one workload."""
    return judge(
        placement,
        load_PLE=one.judged_PLE,
        ranks=spec.ranks,
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


def outcome_of(one: WorkloadEvidence, three: Three) -> WorkloadOutcome:
    """Tell one workload before and after."""
    return WorkloadOutcome(
        workload=one.name,
        passes_planned_from=one.planned_passes,
        passes_judged=one.judged_passes,
        imbalance_before=three.before.imbalance,
        imbalance_rule=three.rule.imbalance,
        imbalance_after=three.after.imbalance,
        pass_before=three.before.spread,
        pass_rule=three.rule.spread,
        pass_after=three.after.spread,
    )


def layer_times_of(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    chosen: Placement,
    rule: Rule,
    threes: Sequence[Three],
    pricing: Pricing,
) -> tuple[LayerTimes, ...]:
    """Price the judged passes of every workload."""
    times = []
    low, high = pricing.band
    for one, three in pairs(evidence, threes):
        before, by_rule, after = (
            pricing.price(
                placement,
                judged,
                load_PLE=one.judged_PLE,
                ranks=spec.ranks,
                recording=one.recording,
            )
            for placement, judged in (
                (spec.current, three.before),
                (rule.placement, three.rule),
                (chosen, three.after),
            )
        )
        after_s = float(after.pass_P.mean())
        times.append(
            LayerTimes(
                workload=one.name,
                before_s=float(before.pass_P.mean()),
                rule_s=float(by_rule.pass_P.mean()),
                after_s=after_s,
                after_s_band=(low * after_s, high * after_s),
                experts_after_s=float(after.experts_PL.sum(axis=1).mean()),
                exchange_after_s=float(after.exchange_PL.sum(axis=1).mean()),
            )
        )
    return tuple(times)


def left_out(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    pricing: Pricing | None,
    dispatch: str,
    time_limit_s: float,
) -> tuple[tuple[LeftOut, ...], tuple[float, ...]]:
    """Plan without each workload in turn and judge on all of its passes."""
    if len(evidence) < 2:
        return (), ()
    folds, worst = [], []
    limit_s = time_limit_s / min(len(evidence), MOST_FOLDS)
    for one in evidence[:MOST_FOLDS]:
        others = [other for other in evidence if other is not one]
        rule = rule_of(others, ranks=spec.ranks, groups=spec.goal.expert_groups)
        outcome = solve_objective(
            others,
            goal=spec.goal,
            ranks=spec.ranks,
            rule=rule,
            active_load=0.0 if pricing is None else pricing.active_load,
            migration=migration_limit(
                spec, expert_bytes=None if pricing is None else pricing.machine.expert_bytes
            ),
            time_limit_s=limit_s,
        )
        if outcome.solution is None:
            continue
        after, by_rule, before = (
            judge(
                placement,
                load_PLE=one.whole_PLE,
                ranks=spec.ranks,
                dispatch=dispatch,
                source_HLE=sources_of(spec, one),
            )
            for placement in (outcome.solution, rule.placement, spec.current)
        )
        folds.append(
            LeftOut(
                workload=one.name,
                imbalance_after=after.imbalance,
                imbalance_rule=by_rule.imbalance,
                imbalance_before=before.imbalance,
                worst_rank_ratio=after.worst_ratio,
                traffic=traffic_on(spec, [one], outcome.solution, rule),
            )
        )
        worst.append(before.worst_ratio)
    return tuple(folds), tuple(worst)


def traffic_of(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    placement: Placement,
    rule: Rule,
) -> float:
    """Return the traffic of a placement, by the objective's own checker."""
    if spec.goal.objective is Objective.LAYER_CHAIN:
        chain = chain_problem(evidence, goal=spec.goal, ranks=spec.ranks, rule=rule)
        return chain_check.objective(chain, placement)
    together = coactivation_problem(evidence, goal=spec.goal, ranks=spec.ranks, rule=rule)
    return coactivation_check.objective(together, placement)


def traffic_by_name(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], chosen: Placement, rule: Rule
) -> dict[str, tuple[float, float, float]]:
    """Return the traffic before, by the rule and after; empty where balance is the objective."""
    found = traffic_on(spec, evidence, chosen, rule)
    return {} if found is None else {spec.goal.objective.value: found}


def traffic_on(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], chosen: Placement, rule: Rule
) -> tuple[float, float, float] | None:
    """Return the traffic of what runs, of the rule and of a placement on some workloads."""
    if spec.goal.objective not in TRAFFIC:
        return None
    before, by_rule, after = (
        traffic_of(spec, evidence, placement, rule)
        for placement in (spec.current, rule.placement, chosen)
    )
    return before, by_rule, after


def gain_of(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    threes: Sequence[Three],
    times: Sequence[LayerTimes],
    traffic: Mapping[str, tuple[float, float, float]],
    pricing: Pricing | None,
) -> tuple[float, float, float | None]:
    """Return the gain, its noise, and the gain as a share of a whole pass.

    Traffic counts by itself unless it is priced: a merged exchange takes time by places touched.
    """
    weights = [one.weight_ratio for one in evidence]
    noise = max(
        noise_of(
            three.before.imbalance_P,
            three.after.imbalance_P,
            largest_copies=float(three.after.copies_PLG.max(axis=2).sum()),
        )
        for three in threes
    )
    if traffic and (pricing is None or not pricing.merges):
        before, _, after = next(iter(traffic.values()))
        return 1.0 - after / before if before > 0.0 else 0.0, noise, None
    if pricing is None:
        before = sum(w * three.before.imbalance for w, three in zip(weights, threes, strict=True))
        after = sum(w * three.after.imbalance for w, three in zip(weights, threes, strict=True))
        return 1.0 - after / before, noise, None
    before = sum(w * one.before_s for w, one in zip(weights, times, strict=True))
    after = sum(w * one.after_s for w, one in zip(weights, times, strict=True))
    top_k = pricing.machine.moe.top_k
    tokens = np.mean([one.judged_PLE.sum(axis=2).mean() / top_k for one in evidence])
    # Layers that were not recorded are as uneven as those that were.
    model_layers = pricing.machine.model.num_moe_layers / len(spec.layer_ids)
    rest = pricing.whole_pass_s(tokens=float(tokens))
    whole = rest + model_layers * before
    return 1.0 - after / before, noise, model_layers * (before - after) / whole


def saved_of(threes: Sequence[Three], *, has_traffic: bool) -> str:
    """Say what there is less of, and what that costs in balance where traffic is the objective."""
    if not has_traffic:
        return "for the busiest ranks to do"
    after = np.mean([three.after.imbalance for three in threes])
    rule = np.mean([three.rule.imbalance for three in threes])
    return f"traffic, with {after / rule - 1.0:+.1%} on busiest ranks against EPLB's rule"
