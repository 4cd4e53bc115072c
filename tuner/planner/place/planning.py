"""From a placement's spec to its plan: evidence, candidates, judgement, certificate, verdict.

The plan is made from the first passes of every workload and judged on the later ones, under the
dispatch of the engine, beside what runs today and beside EPLB's rule on the same loads.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from solvers.placement.ranks import Placement
from solvers.result import Outcome
from tuner.costs.expert_layer import expert_bytes
from tuner.errors import SpecError
from tuner.place_plan import (
    LayerTimes,
    PlaceAlternative,
    PlaceCertificate,
    PlaceDecision,
    PlacePlan,
    PlacePrediction,
    PlaceProvenance,
    PlaceSpace,
)
from tuner.planner.place.candidates import (
    TRAFFIC,
    Rule,
    beside_search,
    migration_limit,
    others_for_time,
    rule_of,
    solve_objective,
    solved_dispatch,
)
from tuner.planner.place.certifying import binding_constraint, certificate_of
from tuner.planner.place.comparing import (
    judge_workload,
    judged_threes,
    layer_times_of,
    outcome_of,
    pairs,
    priced_threes,
)
from tuner.planner.place.costing import active_load_of, parts_cost, planned_cost
from tuner.planner.place.dispatch_choice import (
    choose_dispatch,
    compared_dispatches,
    launch_misfits,
    made_for,
)
from tuner.planner.place.dispatch_gain import dispatch_gain
from tuner.planner.place.evidence import WorkloadEvidence, evidence_of
from tuner.planner.place.folds import unseen_costs
from tuner.planner.place.gaining import gain_of_load, gain_of_time, gain_of_traffic, load_noises
from tuner.planner.place.launch_noise import launch_noise
from tuner.planner.place.leaving_out import left_out
from tuner.planner.place.links import LinkCosts, LinkSource, links_between
from tuner.planner.place.methods import (
    automatic_note,
    beside_automatic,
    nothing_found,
    under_another_rule,
)
from tuner.planner.place.migration import migration_cost
from tuner.planner.place.notes import dispatch_of, notes_of
from tuner.planner.place.pricing import ELEMENT_BYTES, Pricing
from tuner.planner.place.relaxing import relaxations
from tuner.planner.place.sampled import Tokens
from tuner.planner.place.traffic import (
    broken_limits,
    traffic_by_name,
    traffic_of,
    traffic_times,
)
from tuner.planner.place.verdict import Loads, verdict_of
from tuner.spec.files import shown_path
from tuner.spec.place import Objective
from tuner.spec.place_method import Method
from tuner.spec.place_read import PlaceSpec

MAIN_SHARE: Final = 0.5
"""Of the time limit, for the plan itself."""
AGAIN_SHARE: Final = 0.2
"""For the same under another dispatch rule, where the first plan shows it to be the best."""
UNSEEN_SHARE: Final = 0.1
"""For searches in halves of the planned passes, where methods are weighed on the other halves."""
OTHERS_SHARE: Final = 0.4
"""Of that, for placements that are priced beside the search's."""
SAME_RATIO: Final = 1e-9
"""Between objectives that count as equal."""
FOLDS_SHARE: Final = 0.15
"""For plans without each workload in turn; what is left is for relaxations."""


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
    goal, ranks = spec.goal, spec.ranks
    evidence = evidence_of(spec)
    links = links_between(spec, evidence, source or LinkSource())
    pricing = _on_links(pricing, links, goal.objective)
    dispatch = dispatch_of(spec)
    rule = rule_of(evidence, ranks=ranks, groups=goal.expert_groups, dispatch=dispatch)
    weights_bytes = _expert_bytes(spec)
    migration = migration_limit(spec, expert_bytes=weights_bytes)
    is_timed = goal.objective is Objective.LAYER_TIME and goal.method is Method.AUTO
    others_share = OTHERS_SHARE * is_timed

    solve_fold = partial(
        solve_objective,
        ranks=ranks,
        rule=rule,
        links=links,
        active_load=active_load_of(goal, pricing),
        migration=migration,
    )

    def solve(dispatch: str, share: float) -> tuple[Outcome[Placement], dict[str, Placement]]:
        by = partial(solve_fold, evidence, rule=rule, dispatch=dispatch)
        return beside_automatic(by, goal=goal, time_limit_s=share * settings.time_limit_s)

    costs_unseen = partial(
        unseen_costs,
        spec,
        evidence,
        solve_fold,
        time_limit_s=UNSEEN_SHARE * settings.time_limit_s,
    )
    outcome, candidates = solve(dispatch, (1.0 - others_share) * MAIN_SHARE)
    if outcome.solution is None:
        return _nothing(spec, outcome, provenance)
    if is_timed:
        candidates |= others_for_time(
            evidence,
            goal=goal,
            ranks=ranks,
            rule=rule,
            dispatch=dispatch,
            links=links,
            migration=migration,
            time_limit_s=others_share * MAIN_SHARE * settings.time_limit_s,
        )
    candidates |= beside_search(evidence, goal=goal, ranks=ranks, dispatch=dispatch)
    unseen = costs_unseen(dispatch)
    weighed = _weighed(spec, evidence, candidates, rule, pricing, links, dispatch, unseen)
    choice = choose_dispatch(spec, evidence, weighed.chosen, planned=dispatch)
    if choice.rule != dispatch:
        # The rule is chosen once; placements are made for it, weighed and judged under it.
        is_again = solved_dispatch(choice.rule) != solved_dispatch(dispatch)
        dispatch = choice.rule
        rule = rule_of(evidence, ranks=ranks, groups=goal.expert_groups, dispatch=dispatch)
        if is_again:
            again, found = solve(dispatch, AGAIN_SHARE)
            if again.solution is not None:
                candidates = under_another_rule(candidates, found, goal=goal, dispatch=dispatch)
                outcome = again
        candidates |= beside_search(evidence, goal=goal, ranks=ranks, dispatch=dispatch)
        unseen = costs_unseen(dispatch)
        weighed = _weighed(spec, evidence, candidates, rule, pricing, links, dispatch, unseen)
    method, chosen = weighed.method, weighed.chosen
    solve_s = settings.clock() - started_s
    alternatives = _alternatives(spec, evidence, weighed, dispatch)
    threes = judged_threes(spec, evidence, chosen, rule, dispatch)
    outcomes = tuple(outcome_of(one, three) for one, three in pairs(evidence, threes))
    folds, worst = left_out(
        spec,
        evidence,
        pricing,
        dispatch,
        migration,
        links,
        time_limit_s=FOLDS_SHARE * settings.time_limit_s,
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
            slack_ratio=goal.traffic_slack_ratio,
        )
    else:
        gain = gain_of_load(evidence, threes)
    drawn_noise = launch_noise(spec, evidence, chosen, pricing, dispatch=dispatch)
    gain = replace(gain, noise_ratio=math.hypot(gain.noise_ratio, drawn_noise))
    moved = None
    if goal.current is not None:
        moved = migration_cost(
            spec.current,
            chosen,
            current_ranks=spec.current_ranks,
            ranks=ranks,
            expert_bytes=weights_bytes,
            machine=None if pricing is None else pricing.machine,
            step_gain_ratio=gain.step_gain_ratio,
        )
    certificate = certificate_of(
        spec,
        evidence,
        chosen,
        outcome,
        rule,
        pricing,
        links,
        dispatch=dispatch,
        method=method,
        solve_s=solve_s,
    )
    certificate = certificate.model_copy(
        update=_compared(certificate.objective or 0.0, alternatives, noise_ratio=gain.noise_ratio)
    )
    plan = PlacePlan(
        goal=goal,
        cluster=spec.cluster,
        emit=spec.emit,
        decision=_decision(spec, chosen),
        predicted=PlacePrediction(
            imbalance={one.name: three.after.imbalance for one, three in pairs(evidence, threes)},
            imbalance_band={one.name: three.after.band for one, three in pairs(evidence, threes)},
            outcomes=outcomes,
            left_out=folds,
            layer_times=times,
            traffic=traffic,
            links=links.facts if traffic else None,
            traffic_times=traffic_times(spec, evidence, chosen, rule, links),
            migration=moved,
            dispatches=compared_dispatches(spec, evidence, chosen, rule=dispatch),
        ),
        made_for=made_for(spec, dispatch),
        verdict=verdict_of(
            gain_ratio=gain.gain_ratio,
            noise_ratio=gain.noise_ratio,
            step_gain_ratio=gain.step_gain_ratio,
            left_out=folds,
            baseline_worst=worst,
            migration=moved,
            rebalance_s=goal.rebalance_interval,
            saved=gain.saved,
            loads=loads,
            rule_gain_ratio=gain.rule_gain_ratio if migration is None else None,
        ),
        certificate=certificate,
        binding_constraint=binding_constraint(
            spec, evidence, chosen, rule, migration, dispatch=dispatch
        ),
        alternatives=alternatives,
        relaxations=relaxations(
            spec,
            evidence,
            objective=certificate.objective or 0.0,
            rule=rule,
            dispatch=dispatch,
            links=links,
            pricing=pricing,
            migration=migration,
            time_limit_s=settings.time_limit_s,
        ),
        provenance=provenance.model_copy(
            update={
                "notes": (
                    *provenance.notes,
                    *automatic_note(goal, certificate.objective or 0.0, alternatives),
                    *dispatch_gain(
                        spec,
                        evidence,
                        threes,
                        pricing,
                        chosen=chosen,
                        others=(*candidates.values(), rule.placement),
                    ),
                    *notes_of(spec, evidence, dispatch, rule),
                    *choice.notes,
                )
            }
        ),
    )
    whole_s = settings.clock() - started_s
    return plan.model_copy(
        update={"certificate": certificate.model_copy(update={"solve_s": whole_s})}
    )


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Weighed:
    """Placements on the passes that are planned from, under one dispatch rule."""

    placements: Mapping[str, Placement]
    """By name, the one to take first."""
    values: Mapping[str, float]
    """Of the objective."""
    ordered_by: Mapping[str, float]
    broken: Mapping[str, str]
    """The limit that a placement breaks; empty: none."""

    @property
    def method(self) -> str:
        """Name of the one to take."""
        return next(iter(self.placements))

    @property
    def chosen(self) -> Placement:
        """The one to take."""
        return self.placements[self.method]


def _weighed(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    candidates: Mapping[str, Placement],
    rule: Rule,
    pricing: Pricing | None,
    links: LinkCosts,
    dispatch: str,
    unseen: Mapping[str, float],
) -> _Weighed:
    """Order what the goal's method placed, else all by the objective, beside EPLB and what runs.

    Where methods were weighed on passes that they did not see, by that: what was not counts as
    fitted to what it was made from as the worst of them.
    """
    method = spec.goal.method.value
    named = dict(candidates)
    limited = spec.goal.max_moved_experts is not None or spec.goal.max_moved_bytes is not None
    if not limited and method != Method.EPLB.value:
        named[rule.name] = rule.placement
    if spec.current.expert_LS.shape == rule.placement.expert_LS.shape:
        named["as it runs"] = spec.current
    if spec.goal.objective in TRAFFIC:
        values = {
            name: traffic_of(spec, evidence, one, rule, links, tokens=Tokens.PLANNED)
            for name, one in named.items()
        }
        broken = {
            name: (*broken_limits(spec, evidence, one, rule, links), "")[0]
            for name, one in named.items()
        }
    else:
        values = {
            name: planned_cost(spec, evidence, one, pricing, dispatch)
            for name, one in named.items()
        }
        broken = dict.fromkeys(named, "")
    ordered_by = {
        name: parts_cost(spec, evidence, one, values[name], dispatch, pricing)
        for name, one in named.items()
    }
    if unseen:
        made = {name: unseen.get(name.removesuffix(f" for {dispatch}")) for name in named}
        worst = max(cost / values[name] for name, cost in made.items() if cost is not None)
        ordered_by = {name: cost or worst * values[name] for name, cost in made.items()}
    unlaunched = launch_misfits(spec, named, dispatch)
    order = sorted(
        named,
        key=lambda name: (
            name != method,
            bool(unlaunched[name]),
            bool(broken[name]),
            ordered_by[name],
        ),
    )
    if unlaunched[order[0]]:
        raise SpecError(f"{shown_path(spec.path)}: goal.dispatch: {unlaunched[order[0]]}")
    broken = {name: unlaunched[name] or words for name, words in broken.items()}
    return _Weighed(
        placements={name: named[name] for name in order},
        values=values,
        ordered_by=ordered_by,
        broken=broken,
    )


def _alternatives(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], weighed: _Weighed, dispatch: str
) -> tuple[PlaceAlternative, ...]:
    """Tell of the placements that were not taken, judged under the plan's rule."""
    best = weighed.ordered_by[weighed.method]
    return tuple(
        PlaceAlternative(
            method=name,
            decision=_decision(spec, placement),
            objective=weighed.values[name],
            imbalance={
                one.name: judge_workload(spec, one, placement, dispatch).imbalance
                for one in evidence
            },
            is_legal=not weighed.broken[name],
            lost_by=weighed.broken[name] or _more_of(weighed.ordered_by[name], best),
        )
        for name, placement in tuple(weighed.placements.items())[1:]
    )


def _more_of(value: float, least: float) -> str:
    if value < least * (1.0 - SAME_RATIO):
        return f"{1.0 - value / least:.2%} less of the objective, but the goal names its method"
    if value <= least * (1.0 + SAME_RATIO):
        return "as much of the objective"
    return f"{value / max(least, 1e-12) - 1.0:.2%} more of the objective"


def _decision(spec: PlaceSpec, chosen: Placement) -> PlaceDecision:
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
