"""What more room would bring: the same question solved again with one limit moved.

    balance, layer time    one more slot on every rank; twice the limit on moved experts
    ways                   the largest rank load may be 5 % above the rule's

Every line is a true second solve, in what the plan leaves of its time: none is begun after it. An
answer that is hardly better is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from solvers.placement.balance.problem import Migration
from tuner.planner.place.candidates import TRAFFIC, Rule, balance_problem, solve_objective
from tuner.planner.place.cost import active_load_of, planned_cost
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.links import LinkCosts
from tuner.planner.place.methods import balance_refusal, solve_balance
from tuner.planner.place.prices import Pricing
from tuner.planner.place.traffic import problem_scale
from tuner.spec.place import Dispatch, Objective
from tuner.spec.place_read import PlaceSpec

WORTH_TELLING_RATIO = 0.002
"""Of the objective that a relaxation must save."""
MORE_LOAD_RATIO = 0.05


def relaxations(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    *,
    objective: float,
    rule: Rule,
    dispatch: str,
    links: LinkCosts,
    pricing: Pricing | None,
    migration: Migration | None,
    time_limit_s: float,
) -> tuple[str, ...]:
    """Return what each relaxation buys, a line each.

    Args:
        spec: the question.
        evidence: what is planned from.
        objective: of the plan, as its certificate states it.
        rule: whose largest load ways must keep.
        dispatch: the rule that the plan is made for.
        links: that ways are priced on.
        pricing: where time is the objective.
        migration: the limit that was kept.
        time_limit_s: what there is for it; nothing is solved without.
    """
    if time_limit_s <= 0.0:
        return ()
    found = (
        _more_load(spec, evidence, rule, links, time_limit_s)
        if spec.goal.objective in TRAFFIC
        else _more_room(spec, evidence, dispatch, pricing, migration, time_limit_s)
    )
    in_seconds = spec.goal.objective in TRAFFIC and links.unit_s is not None
    unit = " s" if in_seconds or spec.goal.objective is Objective.LAYER_TIME else ""
    return tuple(
        f"{change}: {value:.5g}{unit}, from {objective:.5g}{unit}"
        for change, value in found
        if value < objective * (1.0 - WORTH_TELLING_RATIO)
    )


def _more_load(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    rule: Rule,
    links: LinkCosts,
    limit_s: float,
) -> Iterator[tuple[str, float]]:
    slack = spec.goal.traffic_slack_ratio + MORE_LOAD_RATIO
    outcome = solve_objective(
        evidence,
        goal=spec.goal.model_copy(update={"traffic_slack_ratio": slack}),
        ranks=spec.ranks,
        rule=rule,
        dispatch=Dispatch.EVEN.value,
        links=links,
        active_load=0.0,
        migration=None,
        time_limit_s=limit_s,
    )
    if outcome.solution is not None:
        scale = problem_scale(spec, evidence, rule, links)
        yield f"traffic_slack_ratio {slack:.2f}", outcome.objective / scale


def _more_room(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    dispatch: str,
    pricing: Pricing | None,
    migration: Migration | None,
    limit_s: float,
) -> Iterator[tuple[str, float]]:
    if migration is not None:
        wider = Migration(current=migration.current, most_moved=2 * migration.most_moved + 1)
        change, wanted = f"{wider.most_moved} experts moved", spec
    else:
        wider = None
        if spec.goal.dispatch is Dispatch.LEAST_LOADED:
            # The rule takes one slot an expert.
            return
        more = replace(spec.ranks, slots_G=spec.ranks.slots_G + 1)
        if int(more.slots_G.max()) > spec.num_experts:
            return
        redundant = more.num_slots - spec.num_experts
        change = f"one more slot a rank ({redundant} redundant)"
        wanted = replace(spec, ranks=more)
    problem = balance_problem(
        evidence,
        goal=spec.goal,
        ranks=wanted.ranks,
        dispatch=dispatch,
        active_load=active_load_of(spec.goal, pricing),
        migration=wider,
    )
    if balance_refusal(problem, spec.goal.method) is not None:
        return
    outcome = solve_balance(problem, goal=spec.goal, time_limit_s=limit_s)
    if outcome.solution is not None:
        yield change, planned_cost(wanted, evidence, outcome.solution, pricing, dispatch)
