"""From a placement's spec to its plan: evidence, candidates, judgement, certificate, verdict.

The plan is made from the first passes of every workload and judged on the later ones, under the
dispatch of the engine, beside what runs today and beside EPLB's rule on the same loads.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from solvers.placement.ranks import Placement
from solvers.result import Outcome
from tuner.costs.expert_layer import expert_bytes
from tuner.place_plan import (
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
from tuner.planner.place.candidates import migration_limit
from tuner.planner.place.certificate import binding_constraint, certificate_of
from tuner.planner.place.comparison import (
    Three,
    judged_threes,
    layer_times_of,
    outcome_of,
    pairs,
    priced_threes,
)
from tuner.planner.place.cross_validation import left_out, left_out_note
from tuner.planner.place.deadline import LEAST_PROGRAMS_S, Deadline, fewer_judged, fewer_note
from tuner.planner.place.dispatch_choice import compared_dispatches, made_for
from tuner.planner.place.dispatch_gain import dispatch_gain
from tuner.planner.place.evidence import WorkloadEvidence, evidence_of
from tuner.planner.place.known_table import table_note
from tuner.planner.place.launch_noise import launch_noise
from tuner.planner.place.links import LinkCosts, LinkSource, links_between
from tuner.planner.place.methods import automatic_note, nothing_found
from tuner.planner.place.migration import migration_cost
from tuner.planner.place.notes import dispatch_of, notes_of
from tuner.planner.place.passes import MOST_SOLVED_PASSES
from tuner.planner.place.prices import ELEMENT_BYTES, Pricing
from tuner.planner.place.relaxations import relaxations
from tuner.planner.place.savings import (
    Gain,
    gain_of_load,
    gain_of_time,
    gain_of_traffic,
    load_noises,
)
from tuner.planner.place.search import Question, Searched, search
from tuner.planner.place.selection import alternatives_of, decision_of
from tuner.planner.place.traffic import traffic_by_name, traffic_times
from tuner.planner.place.verdict import Loads, verdict_of
from tuner.spec.place import Objective
from tuner.spec.place_read import PlaceSpec

RELAXING_SHARE: Final = 0.15
"""Of the time limit, for what more room would bring, where so much is left."""
JUDGING_RATIO: Final = 0.9
"""Of what is left after the search, for judging where linear programs do; rest: all else."""
LEFT_OUT_RATIO: Final = 0.5
"""The same where plans without each workload are still to be made and judged."""
JUDGED_PLACEMENTS: Final = 3
"""On each workload left out: its plan, EPLB's rule and what runs."""
LEAST_RELAXING_S: Final = 0.02
"""A search of less finds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How hard to look."""

    time_limit_s: float = 60.0
    clock: Callable[[], float] = time.perf_counter


def make_place_plan(
    spec: PlaceSpec,
    *,
    pricing: Pricing | None,
    settings: Settings,
    provenance: PlaceProvenance,
    source: LinkSource | None = None,
) -> PlacePlan:
    """Plan, judge and certify a placement.

    Args:
        spec: the question.
        pricing: where time is priced.
        settings: how hard to look.
        provenance: what the caller knows of it.
        source: what is known of the links that join the ranks.

    Raises:
        SpecError: the recordings lack what the objective looks at, or a limit cannot be kept.
    """
    started_s = settings.clock()
    evidence = evidence_of(spec)
    links = links_between(spec, evidence, source or LinkSource())
    dispatch = dispatch_of(spec)
    asked = Question(
        spec=spec,
        evidence=evidence,
        pricing=_on_links(pricing, links, spec.goal.objective),
        links=links,
        migration=migration_limit(spec, expert_bytes=_expert_bytes(spec)),
        deadline=Deadline(
            limit_s=settings.time_limit_s,
            until_s=started_s + settings.time_limit_s,
            clock=settings.clock,
        ),
    )
    found = search(asked, dispatch=dispatch)
    if isinstance(found, Outcome):
        return _nothing(spec, found, provenance)
    judged = _judge(asked, found)
    certificate = _certificate(asked, found, judged, solve_s=settings.clock() - started_s)
    plan = _plan(asked, found, judged, certificate, provenance)
    whole_s = settings.clock() - started_s
    return plan.model_copy(
        update={"certificate": certificate.model_copy(update={"solve_s": whole_s})}
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Judgement:
    """The chosen placement on passes that it was not made from."""

    evidence: tuple[WorkloadEvidence, ...]
    """With the passes that were judged on."""
    threes: tuple[Three, ...]
    outcomes: tuple[WorkloadOutcome, ...]
    alternatives: tuple[PlaceAlternative, ...]
    left_out: tuple[LeftOut, ...]
    left_out_before: tuple[float, ...]
    """Of each of them, the worst layer's ratio without a plan."""
    times: tuple[LayerTimes, ...]
    traffic: Mapping[str, tuple[float, float, float]]
    loads: Loads | None
    gain: Gain
    migration: MigrationCost | None
    notes: tuple[str, ...]


def _judge(asked: Question, found: Searched) -> _Judgement:
    """Judge what was chosen, on as many passes as the deadline leaves room for."""
    spec, pricing, links, deadline = asked.spec, asked.pricing, asked.links, asked.deadline
    rule, dispatch, chosen = found.rule, found.dispatch, found.weighed.chosen
    evidence = found.looked_at
    if found.pass_s:
        several = len(evidence) > 1
        evidence = fewer_judged(
            evidence,
            placements=len(found.weighed.placements) + 1,
            pass_s=found.pass_s,
            time_s=max(
                (LEFT_OUT_RATIO if several else JUDGING_RATIO) * deadline.left_s, LEAST_PROGRAMS_S
            ),
        )
    threes = judged_threes(spec, evidence, chosen, rule, dispatch)
    outcomes = tuple(
        outcome_of(one, three, passes_planned_from=whole.planned_passes)
        for whole, one, three in zip(asked.evidence, evidence, threes, strict=True)
    )
    alternatives = alternatives_of(spec, evidence, found.weighed, dispatch)
    passes = max(len(one.whole_PLE) for one in evidence)
    folds, worst = left_out(
        spec,
        evidence,
        pricing,
        dispatch,
        asked.migration,
        links,
        deadline=deadline,
        time_limit_s=deadline.share_s(found.shares.folds),
        judging_s=JUDGED_PLACEMENTS * passes * found.pass_s,
    )
    times: tuple[LayerTimes, ...] = ()
    loads = None
    traffic = traffic_by_name(spec, evidence, chosen, rule, links)
    if pricing is not None:
        priced = priced_threes(spec, evidence, chosen, rule, threes, pricing)
        times = layer_times_of(evidence, priced, pricing)
        gain = gain_of_time(spec, evidence, threes, priced, pricing)
    elif traffic:
        gain = gain_of_traffic(spec, evidence, chosen, traffic, rule, links)
        loads = Loads(
            outcomes=outcomes,
            noises=load_noises(evidence, threes),
            slack_ratio=spec.goal.traffic_slack_ratio,
        )
    else:
        gain = gain_of_load(evidence, threes)
    drawn_noise, drawn_beside_rule = (
        launch_noise(spec, evidence, chosen, pricing, dispatch=dispatch, beside=beside)
        for beside in (spec.current, rule.placement)
    )
    drawn_beside_rule *= 1.0 - gain.rule_gain_ratio
    gain = replace(
        gain,
        noise_ratio=math.hypot(gain.noise_ratio, drawn_noise),
        rule_noise_ratio=math.hypot(gain.rule_noise_ratio, drawn_beside_rule),
    )
    return _Judgement(
        evidence=evidence,
        threes=threes,
        outcomes=outcomes,
        alternatives=alternatives,
        left_out=folds,
        left_out_before=worst,
        times=times,
        traffic=traffic,
        loads=loads,
        gain=gain,
        migration=_move(asked, chosen, gain),
        notes=(*fewer_note(asked.evidence, evidence), *left_out_note(evidence, folds)),
    )


def _move(asked: Question, chosen: Placement, gain: Gain) -> MigrationCost | None:
    spec, pricing = asked.spec, asked.pricing
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
    asked: Question, found: Searched, judged: _Judgement, *, solve_s: float
) -> PlaceCertificate:
    certificate = certificate_of(
        asked.spec,
        found.looked_at,
        found.weighed.chosen,
        found.outcome,
        found.rule,
        asked.pricing,
        asked.links,
        dispatch=found.dispatch,
        method=found.weighed.method,
        solve_s=solve_s,
    )
    compared = _compared(
        certificate.objective or 0.0, judged.alternatives, noise_ratio=judged.gain.noise_ratio
    )
    return certificate.model_copy(update=compared)


def _plan(
    asked: Question,
    found: Searched,
    judged: _Judgement,
    certificate: PlaceCertificate,
    provenance: PlaceProvenance,
) -> PlacePlan:
    spec, goal, links = asked.spec, asked.spec.goal, asked.links
    rule, dispatch, chosen = found.rule, found.dispatch, found.weighed.chosen
    evidence, gain = judged.evidence, judged.gain
    judgements = pairs(evidence, judged.threes)
    plan = PlacePlan(
        goal=goal,
        cluster=spec.cluster,
        emit=spec.emit,
        decision=decision_of(spec, chosen),
        predicted=PlacePrediction(
            imbalance={one.name: three.after.imbalance for one, three in judgements},
            imbalance_band={one.name: three.after.band for one, three in judgements},
            outcomes=judged.outcomes,
            left_out=judged.left_out,
            layer_times=judged.times,
            traffic=dict(judged.traffic),
            links=links.facts if judged.traffic else None,
            traffic_times=traffic_times(spec, evidence, chosen, rule, links),
            migration=judged.migration,
            dispatches=compared_dispatches(spec, evidence, chosen, rule=dispatch),
        ),
        made_for=made_for(spec, dispatch),
        verdict=verdict_of(
            gain_ratio=gain.gain_ratio,
            noise_ratio=gain.noise_ratio,
            step_gain_ratio=gain.step_gain_ratio,
            left_out=judged.left_out,
            baseline_worst=judged.left_out_before,
            migration=judged.migration,
            rebalance_s=goal.rebalance_interval,
            saved=gain.saved,
            loads=judged.loads,
            rule_gain_ratio=gain.rule_gain_ratio if asked.migration is None else None,
            rule_noise_ratio=gain.rule_noise_ratio,
        ),
        certificate=certificate,
        binding_constraint=binding_constraint(
            spec, found.looked_at, chosen, rule, asked.migration, dispatch=dispatch
        ),
        alternatives=judged.alternatives,
        provenance=provenance,
    )
    return plan.model_copy(
        update={
            "relaxations": _relaxations(asked, found, objective=certificate.objective or 0.0),
            "provenance": provenance.model_copy(
                update={"notes": (*provenance.notes, *_notes(asked, found, judged, certificate))}
            ),
        }
    )


def _relaxations(asked: Question, found: Searched, *, objective: float) -> tuple[str, ...]:
    """Look for what more room would bring in what is left of the time.

    A search takes longer than it is told by what the main one did, and what it finds is weighed.
    """
    deadline = asked.deadline
    weighed_s = found.pass_s * sum(
        min(one.planned_passes, MOST_SOLVED_PASSES) for one in found.looked_at
    )
    limit_s = min(
        RELAXING_SHARE * deadline.limit_s, deadline.left_s - 2.0 * found.over_s - weighed_s
    )
    return relaxations(
        asked.spec,
        found.looked_at,
        objective=objective,
        rule=found.rule,
        dispatch=found.dispatch,
        links=asked.links,
        pricing=asked.pricing,
        migration=asked.migration,
        time_limit_s=limit_s if limit_s >= LEAST_RELAXING_S else 0.0,
    )


def _notes(
    asked: Question, found: Searched, judged: _Judgement, certificate: PlaceCertificate
) -> Iterator[str]:
    spec, evidence = asked.spec, judged.evidence
    yield from automatic_note(spec.goal, certificate.objective or 0.0, judged.alternatives)
    yield from dispatch_gain(
        spec,
        evidence,
        judged.threes,
        asked.pricing,
        chosen=found.weighed.chosen,
        others=(*found.candidates.values(), found.rule.placement),
    )
    yield from notes_of(spec, asked.evidence, found.dispatch, found.rule)
    yield from table_note(spec, asked.evidence, found.weighed.chosen, found.dispatch)
    yield from found.notes
    yield from judged.notes


def _on_links(pricing: Pricing | None, links: LinkCosts, objective: Objective) -> Pricing | None:
    """Return the machine with the links between ranks; None where nothing is priced."""
    if pricing is None or objective is Objective.LAYER_CHAIN:
        # Tokens stay where their last expert was: no dispatch and combine that is priced.
        return None
    return replace(pricing, slow_NN=links.slow_NN)


def _compared(
    objective: float, alternatives: Sequence[PlaceAlternative], *, noise_ratio: float
) -> dict[str, object]:
    """Count what was compared whole, and what the noise cannot tell from the chosen one."""
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


def _nothing(
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
        binding_constraint=nothing_found(spec.goal),
        provenance=provenance,
    )
