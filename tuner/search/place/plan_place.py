"""Planning of a placement: evidence, candidates, evaluation, certificate, verdict.

The plan is solved on the fit passes of every workload and evaluated on the hold-out passes, under
the engine's dispatch rule, next to the current placement and EPLB's on the same loads.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from solvers.placement.ranks import Placement
from solvers.result import Outcome
from tuner.costs.place.expert_layer import expert_bytes
from tuner.plans.place import (
    LayerTimes,
    LeftOut,
    MigrationCost,
    PlaceAlternative,
    PlaceCertificate,
    PlacePlan,
    PlacePrediction,
    PlaceProvenance,
    PlaceSpace,
    WorkloadOutcome,
)
from tuner.search.place.candidates import migration_limit
from tuner.search.place.certificate import binding_constraint, to_certificate
from tuner.search.place.comparison import (
    PlacementComparison,
    compare_loads,
    pairs,
    price_comparisons,
    to_layer_times,
    to_outcome,
)
from tuner.search.place.cross_validation import leave_one_out, leave_one_out_note
from tuner.search.place.deadline import MIN_LP_S, limit_holdout_passes, limit_note
from tuner.search.place.dispatch_choice import compared_dispatches, made_for
from tuner.search.place.dispatch_gain import dispatch_gain
from tuner.search.place.evidence import WorkloadEvidence, split_recordings
from tuner.search.place.links import LinkCosts, LinkSource, links_between
from tuner.search.place.methods import no_placement_reason
from tuner.search.place.migration import migration_cost
from tuner.search.place.notes import assumption_notes, planned_dispatch
from tuner.search.place.prices import ELEMENT_BYTES, Pricing
from tuner.search.place.savings import (
    Gain,
    load_gain,
    load_noises,
    time_gain,
    traffic_gain,
)
from tuner.search.place.search import PlaceProblem, SearchResult, search
from tuner.search.place.selection import to_alternatives, to_decision
from tuner.search.place.traffic import traffic_by_name, traffic_times
from tuner.search.place.verdict import Loads, to_verdict
from tuner.search.settings import SearchSettings
from tuner.spec.place import Objective
from tuner.spec.place_method import FORMER, Method
from tuner.spec.place_read import PlaceSpec

HOLDOUT_RATIO: Final = 0.9
"""Share of the time left after the search for evaluation by linear programs."""
LEFT_OUT_RATIO: Final = 0.5
"""Share of that time where leave-one-out plans are still to be solved and evaluated."""
HOLDOUT_PLACEMENTS: Final = 3
"""Evaluated on each workload left out: its plan, EPLB's and the current placement."""


def make_place_plan(
    spec: PlaceSpec,
    *,
    pricing: Pricing | None,
    settings: SearchSettings,
    provenance: PlaceProvenance,
    source: LinkSource | None = None,
) -> PlacePlan:
    """Plan, evaluate and certify a placement.

    Args:
        spec: what to plan.
        pricing: of time; None: loads are balanced.
        settings: time limit.
        provenance: as far as the caller knows it.
        source: links between the ranks.

    Raises:
        SpecError: the recordings lack what the objective needs, or a limit cannot be kept.
    """
    deadline = settings.begin()
    evidence = split_recordings(spec)
    links = links_between(spec, evidence, source or LinkSource())
    dispatch = planned_dispatch(spec)
    problem = PlaceProblem(
        spec=spec,
        evidence=evidence,
        pricing=_on_links(pricing, links, spec.goal.objective),
        links=links,
        migration=migration_limit(spec, expert_bytes=_expert_bytes(spec)),
        deadline=deadline,
    )
    result = search(problem, dispatch=dispatch)
    if isinstance(result, Outcome):
        return _no_plan(spec, result, provenance)
    holdout = _evaluate_holdout(problem, result)
    certificate = _certificate(problem, result, holdout, solve_s=deadline.elapsed_s)
    plan = _plan(problem, result, holdout, certificate, provenance)
    whole_s = deadline.elapsed_s
    return plan.model_copy(
        update={"certificate": certificate.model_copy(update={"solve_s": whole_s})}
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _HoldoutResult:
    """The chosen placement on the hold-out passes."""

    evidence: tuple[WorkloadEvidence, ...]
    """Evidence of all workloads, with the hold-out passes that were evaluated."""
    comparisons: tuple[PlacementComparison, ...]
    outcomes: tuple[WorkloadOutcome, ...]
    alternatives: tuple[PlaceAlternative, ...]
    left_out: tuple[LeftOut, ...]
    baseline_worst: tuple[float, ...]
    """Worst layer's imbalance without a plan, for each workload left out."""
    times: tuple[LayerTimes, ...]
    traffic: Mapping[str, tuple[float, float, float]]
    loads: Loads | None
    gain: Gain
    migration: MigrationCost | None
    notes: tuple[str, ...]


def _evaluate_holdout(problem: PlaceProblem, result: SearchResult) -> _HoldoutResult:
    """Evaluate the chosen placement, on as many hold-out passes as the deadline allows."""
    spec, pricing, links, deadline = problem.spec, problem.pricing, problem.links, problem.deadline
    baseline, dispatch, chosen = result.baseline, result.dispatch, result.scores.chosen
    evidence = result.scored_evidence
    if result.pass_s:
        several = len(evidence) > 1
        evidence = limit_holdout_passes(
            evidence,
            placements=len(result.scores.placements) + 1,
            pass_s=result.pass_s,
            time_s=max((LEFT_OUT_RATIO if several else HOLDOUT_RATIO) * deadline.left_s, MIN_LP_S),
        )
    comparisons = compare_loads(spec, evidence, chosen, baseline, dispatch)
    outcomes = tuple(
        to_outcome(one, comparison, passes_planned_from=whole.num_fit_passes)
        for whole, one, comparison in zip(problem.evidence, evidence, comparisons, strict=True)
    )
    alternatives = to_alternatives(spec, evidence, result.scores, dispatch)
    passes = max(len(one.whole_PLE) for one in evidence)
    folds, worst = leave_one_out(
        spec,
        evidence,
        pricing,
        dispatch,
        problem.migration,
        links,
        deadline=deadline,
        time_limit_s=deadline.share_s(result.shares.leave_one_out),
        evaluation_s=HOLDOUT_PLACEMENTS * passes * result.pass_s,
    )
    times: tuple[LayerTimes, ...] = ()
    loads = None
    traffic = traffic_by_name(spec, evidence, chosen, baseline, links)
    if pricing is not None:
        priced = price_comparisons(spec, evidence, chosen, baseline, comparisons, pricing)
        times = to_layer_times(evidence, priced, pricing)
        gain = time_gain(spec, evidence, comparisons, priced, pricing)
    elif traffic:
        gain = traffic_gain(spec, evidence, chosen, traffic, baseline, links)
        loads = Loads(
            outcomes=outcomes,
            noises=load_noises(evidence, comparisons),
            slack_ratio=spec.goal.traffic_slack_ratio,
        )
    else:
        gain = load_gain(evidence, comparisons)
    return _HoldoutResult(
        evidence=evidence,
        comparisons=comparisons,
        outcomes=outcomes,
        alternatives=alternatives,
        left_out=folds,
        baseline_worst=worst,
        times=times,
        traffic=traffic,
        loads=loads,
        gain=gain,
        migration=_migration(problem, chosen, gain),
        notes=(*limit_note(problem.evidence, evidence), *leave_one_out_note(evidence, folds)),
    )


def _migration(problem: PlaceProblem, chosen: Placement, gain: Gain) -> MigrationCost | None:
    spec, pricing = problem.spec, problem.pricing
    if spec.goal.current is None:
        return None
    return migration_cost(
        spec.current,
        chosen,
        current_ranks=spec.current_ranks,
        ranks=spec.ranks,
        expert_bytes=_expert_bytes(spec),
        machine=None if pricing is None else pricing.machine,
        step_gain_ratio=gain.step_gain_ratio,
    )


def _certificate(
    problem: PlaceProblem, result: SearchResult, holdout: _HoldoutResult, *, solve_s: float
) -> PlaceCertificate:
    certificate = to_certificate(
        problem.spec,
        result.scored_evidence,
        result.scores.chosen,
        result.outcome,
        result.baseline,
        problem.pricing,
        problem.links,
        dispatch=result.dispatch,
        method=result.scores.method,
        solve_s=solve_s,
    )
    compared = _alternative_counts(
        result.scores.values[result.scores.method],
        holdout.alternatives,
        noise_ratio=holdout.gain.noise_ratio,
    )
    return certificate.model_copy(update=compared)


def _plan(
    problem: PlaceProblem,
    result: SearchResult,
    holdout: _HoldoutResult,
    certificate: PlaceCertificate,
    provenance: PlaceProvenance,
) -> PlacePlan:
    spec, goal, links = problem.spec, problem.spec.goal, problem.links
    baseline, dispatch, chosen = result.baseline, result.dispatch, result.scores.chosen
    evidence, gain = holdout.evidence, holdout.gain
    by_workload = pairs(evidence, holdout.comparisons)
    plan = PlacePlan(
        goal=goal,
        cluster=spec.cluster,
        emit=spec.emit,
        decision=to_decision(spec, chosen),
        predicted=PlacePrediction(
            imbalance={one.name: comparison.planned.imbalance for one, comparison in by_workload},
            imbalance_band={one.name: comparison.planned.band for one, comparison in by_workload},
            outcomes=holdout.outcomes,
            left_out=holdout.left_out,
            layer_times=holdout.times,
            traffic=dict(holdout.traffic),
            links=links.facts if holdout.traffic else None,
            traffic_times=traffic_times(spec, evidence, chosen, baseline, links),
            migration=holdout.migration,
            dispatches=compared_dispatches(spec, evidence, chosen, rule=dispatch),
        ),
        made_for=made_for(spec, dispatch),
        verdict=to_verdict(
            gain_ratio=gain.gain_ratio,
            noise_ratio=gain.noise_ratio,
            step_gain_ratio=gain.step_gain_ratio,
            left_out=holdout.left_out,
            baseline_worst=holdout.baseline_worst,
            migration=holdout.migration,
            rebalance_s=goal.rebalance_interval,
            saved=gain.saved,
            loads=holdout.loads,
            eplb_gain_ratio=gain.eplb_gain_ratio if problem.migration is None else None,
            eplb_noise_ratio=gain.eplb_noise_ratio,
        ),
        certificate=certificate,
        binding_constraint=binding_constraint(
            spec, result.scored_evidence, chosen, baseline, problem.migration, dispatch=dispatch
        ),
        alternatives=holdout.alternatives,
        provenance=provenance,
    )
    unlaunchable, gain_notes = dispatch_gain(
        spec,
        result.scored_evidence,
        holdout.comparisons,
        problem.pricing,
        chosen=result.scores.chosen,
        candidates=tuple(result.scores.placements.values()),
    )
    return plan.model_copy(
        update={
            "unlaunchable": unlaunchable,
            "provenance": provenance.model_copy(
                update={
                    "notes": (
                        *provenance.notes,
                        *gain_notes,
                        *_notes(problem, result, holdout),
                    )
                }
            ),
        }
    )


def _notes(problem: PlaceProblem, result: SearchResult, holdout: _HoldoutResult) -> Iterator[str]:
    spec = problem.spec
    method = spec.goal.method
    if method is not Method.AUTO:
        yield f"method {method.value}, as the goal says, whatever auto would find"
    if method is Method.LOCAL_SEARCH:
        yield f"{', '.join(sorted(FORMER))} are methods no more and read as local_search"
    yield from assumption_notes(spec, problem.evidence, result.dispatch, result.baseline)
    yield from result.notes
    yield from holdout.notes


def _on_links(pricing: Pricing | None, links: LinkCosts, objective: Objective) -> Pricing | None:
    """Return the pricing with the links between ranks; None where nothing is priced."""
    if pricing is None or objective is Objective.LAYER_CHAIN:
        # Tokens stay on the rank of their last expert: there is no dispatch or combine to price.
        return None
    return replace(pricing, slow_NN=links.slow_NN)


def _alternative_counts(
    objective: float, alternatives: Sequence[PlaceAlternative], *, noise_ratio: float
) -> dict[str, object]:
    """Count the legal and illegal alternatives, and the ties within the noise."""
    legal = [one for one in alternatives if one.is_legal]
    most = objective * noise_ratio
    return {
        "space": PlaceSpace(priced=1 + len(legal), illegal=len(alternatives) - len(legal)),
        "within_band": sum(abs(one.objective - objective) <= most for one in legal),
    }


def _expert_bytes(spec: PlaceSpec) -> float | None:
    if spec.model is None:
        return None
    return expert_bytes(spec.model, element_bytes=ELEMENT_BYTES[spec.goal.quantization])


def _no_plan(
    spec: PlaceSpec, outcome: Outcome[Placement], provenance: PlaceProvenance
) -> PlacePlan:
    status = "infeasible" if outcome.status.value == "infeasible" else "unknown"
    return PlacePlan(
        goal=spec.goal,
        cluster=spec.cluster,
        emit=spec.emit,
        decision=None,
        predicted=None,
        verdict=None,
        certificate=PlaceCertificate(
            status=status,
            objective=None,
            bound=None,
            gap_ratio=1.0,
            solve_s=outcome.solve_s,
            method=outcome.method,
        ),
        binding_constraint=no_placement_reason(spec.goal),
        provenance=provenance,
    )
