"""Planning of a placement: evidence, candidates, evaluation, certificate, verdict.

The plan is solved on the fit passes of every workload and evaluated on the hold-out passes, under
the engine's dispatch rule, next to the current placement and EPLB's on the same loads.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from solvers.placement.balance.migration import loaded_LG
from solvers.placement.ranks import Placement
from solvers.result import Outcome, Status
from tuner.config.place import PlaceDecision
from tuner.costs.place import expert_bytes
from tuner.plans.place import (
    LayerTimes,
    MigrationCost,
    PlaceAlternative,
    PlaceCertificate,
    PlacePlan,
    PlacePrediction,
    PlaceProvenance,
    TrafficTimes,
    WorkloadOutcome,
)
from tuner.plans.train import Space
from tuner.search.place.certificate import binding_constraint, to_certificate
from tuner.search.place.cost import evaluate_workload, pass_copies
from tuner.search.place.dispatch_choice import compared_dispatches, made_for, planned_dispatch
from tuner.search.place.evidence import WorkloadEvidence, split_recordings
from tuner.search.place.links import links_between
from tuner.search.place.notes import assumption_notes
from tuner.search.place.prices import ELEMENT_BYTES, PlacePool, pricing_of
from tuner.search.place.problem import PlaceProblem, migration_limit
from tuner.search.place.search import Candidate, leave_one_out, search
from tuner.search.place.verdict import Compared, gain_noise, gain_of, to_verdict
from tuner.search.settings import SearchSettings
from tuner.spec.place import Objective
from tuner.spec.place_method import Method
from tuner.spec.place_spec import PlaceSpec
from tuner.units import format_ratio

SAME_RATIO: Final = 1e-9
"""Relative difference of costs that count as equal."""


def state_problem(
    spec: PlaceSpec, *, pool: PlacePool | None = None, settings: SearchSettings
) -> PlaceProblem:
    """Collect what is known before a search, whose time limit begins.

    Args:
        spec: what to plan.
        pool: that prices time and links; None: nothing is known of it.
        settings: time limit.

    Raises:
        SpecError: a limit cannot be kept.
    """
    deadline = settings.begin()
    evidence, pool = split_recordings(spec), pool or PlacePool()
    # Tokens of a chain stay on the rank of their last expert: no dispatch or combine to price.
    is_chain = spec.goal.objective is Objective.LAYER_CHAIN
    return PlaceProblem(
        spec=spec,
        evidence=evidence,
        pricing=None if is_chain else pricing_of(spec.model, pool, spec.goal),
        links=links_between(spec, evidence, pool),
        migration=migration_limit(spec, expert_bytes=_expert_bytes(spec)),
        deadline=deadline,
        dispatch=planned_dispatch(spec),
    )


def make_place_plan(
    spec: PlaceSpec,
    *,
    pool: PlacePool | None = None,
    settings: SearchSettings,
    provenance: PlaceProvenance,
) -> PlacePlan:
    """Plan, evaluate and certify a placement.

    Args:
        spec: what to plan.
        pool: that prices time and links; None: nothing is known of it.
        settings: time limit.
        provenance: as far as the caller knows it.

    Raises:
        SpecError: the recordings lack what the objective needs, or a limit cannot be kept.
    """
    result = search(state_problem(spec, pool=pool, settings=settings))
    if isinstance(result, Outcome):
        return _no_plan(spec, result, provenance)
    problem, (best, *others) = result.problem, result.candidates
    chosen, evidence, goal = best.placement, problem.evidence, spec.goal
    before, eplb, planned = (
        [evaluate_workload(problem, workload, placement) for workload in evidence]
        for placement in (spec.current, problem.baseline.placement, chosen)
    )
    compared = list(zip(before, eplb, planned, strict=True))
    outcomes = tuple(map(_outcome, evidence, compared))
    folds = leave_one_out(problem)
    gain = gain_of(problem, compared)
    migration = None
    if goal.current is not None:
        migration = migration_cost(problem, chosen, step_gain_ratio=gain.step_gain_ratio)
    traffic = () if planned[0].traffic is None else _mean_traffic(problem, compared)
    noises = [
        gain_noise(first.loads.imbalance_P, last.loads.imbalance_P, counted=last.load_events)
        for first, _, last in compared
    ]
    is_load_unpriced = bool(traffic) and problem.pricing is None
    legal = [candidate for candidate in result.candidates if not candidate.broken]
    notes = assumption_notes(problem, compared, folds)
    return PlacePlan(
        goal=goal,
        cluster=spec.cluster,
        emit=spec.emit,
        decision=to_decision(spec, chosen),
        predicted=PlacePrediction(
            imbalance={outcome.workload: outcome.imbalance_after for outcome in outcomes},
            imbalance_band={
                workload.name: cost.loads.band
                for workload, cost in zip(evidence, planned, strict=True)
            },
            outcomes=outcomes,
            left_out=folds,
            layer_times=_layer_times(problem, compared),
            traffic={goal.objective.value: traffic} if traffic else {},
            links=problem.links.facts if traffic else None,
            traffic_times=_traffic_times(problem, compared),
            migration=migration,
            dispatches=compared_dispatches(problem, chosen),
        ),
        made_for=made_for(spec, problem.dispatch),
        verdict=to_verdict(
            gain,
            left_out=folds,
            migration=migration,
            rebalance_s=goal.rebalance_interval,
            loads=list(zip(outcomes, noises, strict=True)) if is_load_unpriced else (),
            slack_ratio=goal.traffic_slack_ratio,
        ),
        binding_constraint=binding_constraint(problem, chosen),
        alternatives=tuple(_alternative(problem, candidate, best) for candidate in others),
        provenance=provenance.model_copy(
            update={"notes": (*provenance.notes, *notes, *result.notes)}
        ),
        # Last: it states the time of planning.
        certificate=to_certificate(problem, chosen, result.outcome, method=best.name).model_copy(
            update={
                "space": Space(
                    priced=len(legal), bounded=0, illegal=len(result.candidates) - len(legal)
                ),
                "within_band": sum(
                    abs(candidate.objective - best.objective) <= gain.noise_ratio * best.objective
                    for candidate in legal
                    if candidate is not best
                ),
            }
        ),
    )


def migration_cost(
    problem: PlaceProblem, chosen: Placement, *, step_gain_ratio: float | None
) -> MigrationCost:
    """Count and price the move from the current placement.

    A rank loads the experts that it does not hold yet; their slots do not matter. The rank that
    loads most sets the transfer time: over the network if there are several nodes (an expert may
    come from anywhere), over the scale-up links otherwise. Break-even is when the saved share of
    whole passes equals the transfer time.
    """
    spec, pricing = problem.spec, problem.pricing
    moved_LG = loaded_LG(spec.current, chosen, ranks=spec.ranks, current_ranks=spec.current_ranks)
    loaded_G, size = moved_LG.sum(axis=0), _expert_bytes(spec)
    transfer_s = break_even_s = None
    if pricing is not None and size is not None:
        hardware = pricing.machine.hardware
        is_far = spec.ranks.num_nodes > 1
        rate = hardware.scale_out_bytes_per_s if is_far else hardware.scale_up_bytes_per_s
        transfer_s = float(loaded_G.max()) * size / float(np.max(rate))
        pays = step_gain_ratio is not None and step_gain_ratio > 0.0
        break_even_s = transfer_s / step_gain_ratio if pays and step_gain_ratio else None
    return MigrationCost(
        moved_experts=int(loaded_G.sum()),
        moved_bytes=None if size is None else int(int(loaded_G.sum()) * size),
        transfer_s=transfer_s,
        break_even_s=break_even_s,
    )


def _outcome(workload: WorkloadEvidence, costs: Compared) -> WorkloadOutcome:
    before, rule, after = (cost.loads for cost in costs)
    return WorkloadOutcome(
        workload=workload.name,
        passes_planned_from=workload.num_fit_passes,
        passes_judged=len(workload.holdout_PLE) * workload.is_split,
        imbalance_before=before.imbalance,
        imbalance_rule=rule.imbalance,
        imbalance_after=after.imbalance,
        pass_before=before.spread,
        pass_after=after.spread,
    )


def _layer_times(problem: PlaceProblem, compared: Sequence[Compared]) -> tuple[LayerTimes, ...]:
    times: list[LayerTimes] = []
    for workload, costs in zip(problem.evidence, compared, strict=True):
        seconds = costs[2].seconds
        if seconds is None or problem.pricing is None:
            return ()
        before_s, rule_s, after_s = (cost.value for cost in costs)
        low, high = problem.pricing.band
        time = LayerTimes(
            workload=workload.name,
            before_s=before_s,
            rule_s=rule_s,
            after_s=after_s,
            after_s_band=(low * after_s, high * after_s),
            experts_after_s=float(seconds.experts_PL.sum(axis=1).mean()),
            exchange_after_s=float(seconds.all_to_all_PL.sum(axis=1).mean()),
        )
        times.append(time)
    return tuple(times)


def _mean_traffic(
    problem: PlaceProblem, compared: Sequence[Compared]
) -> tuple[float, float, float]:
    before, rule, after = (
        sum(
            workload.weight_ratio * (costs[at].traffic or 0.0)
            for workload, costs in zip(problem.evidence, compared, strict=True)
        )
        for at in range(3)
    )
    return before, rule, after


def _traffic_times(problem: PlaceProblem, compared: Sequence[Compared]) -> tuple[TrafficTimes, ...]:
    """Return the traffic of each workload in seconds per pass; empty where links have none."""
    if not problem.spec.goal.is_about_traffic or problem.links.unit_s is None:
        return ()
    times = []
    for workload, costs in zip(problem.evidence, compared, strict=True):
        before_s, rule_s, after_s = (
            pass_copies(problem, workload) * (cost.traffic or 0.0) for cost in costs
        )
        held_LTK = workload.holdout_LTK if workload.has_holdout_transitions else None
        time = TrafficTimes(
            workload=workload.name,
            tokens_judged=0 if held_LTK is None else held_LTK.shape[1],
            before_s=before_s,
            rule_s=rule_s,
            after_s=after_s,
        )
        times.append(time)
    return tuple(times)


def _alternative(problem: PlaceProblem, candidate: Candidate, best: Candidate) -> PlaceAlternative:
    """Format another candidate, evaluated under the plan's dispatch rule."""
    return PlaceAlternative(
        method=candidate.name,
        decision=to_decision(problem.spec, candidate.placement),
        objective=candidate.objective,
        imbalance={
            workload.name: evaluate_workload(problem, workload, candidate.placement).loads.imbalance
            for workload in problem.evidence
        },
        is_legal=not candidate.broken,
        lost_by=candidate.broken or lost_by(candidate.objective, best.objective),
    )


def lost_by(value: float, least: float) -> str:
    """Compare an alternative's objective with the plan's."""
    if value < least * (1.0 - SAME_RATIO):
        less = format_ratio(1.0 - value / least, digits=2)
        return f"{less} less of the objective, but the goal names its method"
    if value <= least * (1.0 + SAME_RATIO):
        return "as much of the objective"
    return f"{format_ratio(value / max(least, 1e-12) - 1.0, digits=2)} more of the objective"


def to_decision(spec: PlaceSpec, chosen: Placement) -> PlaceDecision:
    """Format a placement for the plan."""
    goal = spec.goal
    return PlaceDecision(
        physical_to_logical=tuple(tuple(row) for row in chosen.expert_LS.tolist()),
        layer_ids=spec.layer_ids,
        num_experts=spec.num_experts,
        num_layers=spec.num_layers,
        ranks=goal.ranks,
        ranks_per_node=goal.ranks_per_node or goal.ranks,
        slots_per_rank=tuple(spec.ranks.slots_G.tolist()),
    )


def _expert_bytes(spec: PlaceSpec) -> float | None:
    if spec.model is None:
        return None
    return expert_bytes(spec.model, element_bytes=ELEMENT_BYTES[spec.goal.quantization])


def _no_plan(
    spec: PlaceSpec, outcome: Outcome[Placement], provenance: PlaceProvenance
) -> PlacePlan:
    method = "" if spec.goal.method is Method.AUTO else ", or take method auto"
    binding = f"none found in the time limit; give more with --time-limit{method}"
    if is_proven := outcome.status is Status.INFEASIBLE:
        binding = (
            f"the load limit of {spec.goal.objective.value}, which method {outcome.method} proves"
            f" that it cannot keep; raise goal.traffic_slack_ratio{method}"
        )
    return PlacePlan(
        goal=spec.goal,
        cluster=spec.cluster,
        emit=spec.emit,
        decision=None,
        predicted=None,
        verdict=None,
        certificate=PlaceCertificate(
            status="infeasible" if is_proven else "unknown",
            objective=None,
            bound=None,
            gap_ratio=1.0,
            solve_s=outcome.solve_s,
            method=outcome.method,
        ),
        binding_constraint=binding,
        provenance=provenance,
    )
