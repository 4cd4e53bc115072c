"""Relaxations: the same problem solved again with one limit moved.

    balance, layer time    one more slot on every rank; twice the limit on moved experts
    traffic                the largest rank load may be 5 % above EPLB's

Each is a second solve in the time that the plan leaves; none starts after it. Relaxations that
save next to nothing are left out.
"""

from collections.abc import Iterator
from dataclasses import replace

from solvers.placement.balance.problem import Migration
from tuner.search.place.candidates import TRAFFIC, EplbBaseline, balance_problem, solve_objective
from tuner.search.place.cost import active_load_of, fit_cost
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.links import LinkCosts
from tuner.search.place.methods import balance_refusal, solve_balance
from tuner.search.place.prices import Pricing
from tuner.search.place.traffic import problem_scale
from tuner.spec.place import Dispatch, Objective
from tuner.spec.place_read import PlaceSpec

MIN_SAVING_RATIO = 0.002
"""Share of the objective that a relaxation must save."""
MORE_LOAD_RATIO = 0.05


def relaxations(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    *,
    objective: float,
    baseline: EplbBaseline,
    dispatch: str,
    links: LinkCosts,
    pricing: Pricing | None,
    migration: Migration | None,
    time_limit_s: float,
) -> tuple[str, ...]:
    """Return what each relaxation saves, one line each.

    Args:
        spec: what to plan.
        evidence: with the fit passes.
        objective: of the plan, as its certificate states it.
        baseline: EPLB's, whose largest load limits objectives about traffic.
        dispatch: the rule that the plan is made for.
        links: that traffic is priced on.
        pricing: where time is the objective.
        migration: the limit that was kept.
        time_limit_s: of all solves; 0: none.
    """
    if time_limit_s <= 0.0:
        return ()
    changes = (
        _more_load(spec, evidence, baseline, links, time_limit_s)
        if spec.goal.objective in TRAFFIC
        else _more_room(spec, evidence, dispatch, pricing, migration, time_limit_s)
    )
    in_seconds = spec.goal.objective in TRAFFIC and links.unit_s is not None
    unit = " s" if in_seconds or spec.goal.objective is Objective.LAYER_TIME else ""
    return tuple(
        f"{change}: {value:.5g}{unit}, from {objective:.5g}{unit}"
        for change, value in changes
        if value < objective * (1.0 - MIN_SAVING_RATIO)
    )


def _more_load(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    baseline: EplbBaseline,
    links: LinkCosts,
    limit_s: float,
) -> Iterator[tuple[str, float]]:
    slack = spec.goal.traffic_slack_ratio + MORE_LOAD_RATIO
    outcome = solve_objective(
        evidence,
        goal=spec.goal.model_copy(update={"traffic_slack_ratio": slack}),
        ranks=spec.ranks,
        baseline=baseline,
        dispatch=Dispatch.EVEN.value,
        links=links,
        active_load=0.0,
        migration=None,
        time_limit_s=limit_s,
    )
    if outcome.solution is not None:
        scale = problem_scale(spec, evidence, baseline, links)
        yield f"traffic_slack_ratio {slack:.2f}", outcome.objective / scale


def _more_room(
    spec: PlaceSpec,
    evidence: tuple[WorkloadEvidence, ...],
    dispatch: str,
    pricing: Pricing | None,
    migration: Migration | None,
    limit_s: float,
) -> Iterator[tuple[str, float]]:
    if migration is not None:
        wider = Migration(current=migration.current, most_moved=2 * migration.most_moved + 1)
        change, relaxed = f"{wider.most_moved} experts moved", spec
    else:
        wider = None
        if spec.goal.dispatch is Dispatch.LEAST_LOADED:
            # The rule allows one slot per expert.
            return
        more = replace(spec.ranks, slots_G=spec.ranks.slots_G + 1)
        if int(more.slots_G.max()) > spec.num_experts:
            return
        redundant = more.num_slots - spec.num_experts
        change = f"one more slot a rank ({redundant} redundant)"
        relaxed = replace(spec, ranks=more)
    problem = balance_problem(
        evidence,
        goal=spec.goal,
        ranks=relaxed.ranks,
        dispatch=dispatch,
        active_load=active_load_of(spec.goal, pricing),
        migration=wider,
    )
    if balance_refusal(problem, spec.goal.method) is not None:
        return
    outcome = solve_balance(problem, goal=spec.goal, time_limit_s=limit_s)
    if outcome.solution is not None:
        yield change, fit_cost(relaxed, evidence, outcome.solution, pricing, dispatch)
