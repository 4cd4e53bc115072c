"""What more room would bring: the same question solved again with one limit moved.

    balance, layer time    one more slot on every rank; twice the limit on moved experts
    ways                   the largest rank load may be 5 % above the rule's

Every line is a true second solve, in a short time; an answer that is hardly better is left out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from solvers.placement.balance.problem import Migration
from solvers.placement.ranks import Ranks
from solvers.registry import BALANCE
from tuner.planner.place.candidates import TRAFFIC, Rule, balance_problem, solve_objective
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.spec.place_read import PlaceSpec

WORTH_TELLING_RATIO = 0.002
"""Of the objective that a relaxation must save."""
MORE_LOAD_RATIO = 0.05
SHARE = 0.15
"""Of the time limit, for each relaxation."""


def relaxations(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    *,
    objective: float,
    rule: Rule,
    migration: Migration | None,
    time_limit_s: float,
) -> tuple[str, ...]:
    """Return what each relaxation buys, a line each.

    Args:
        spec: the question.
        evidence: what is planned from.
        objective: of the plan, in the solver's own terms (imbalance, or traffic).
        rule: whose largest load ways must keep.
        migration: the limit that was kept.
        time_limit_s: of the whole plan.
    """
    limit_s = SHARE * time_limit_s
    found = (
        _more_load(spec, evidence, rule, limit_s)
        if spec.goal.objective in TRAFFIC
        else _more_room(spec, evidence, migration, limit_s)
    )
    return tuple(
        f"{change}: {value:.5g}, from {objective:.5g}"
        for change, value in found
        if value < objective * (1.0 - WORTH_TELLING_RATIO)
    )


def _more_load(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], rule: Rule, limit_s: float
) -> Iterator[tuple[str, float]]:
    slack = spec.goal.traffic_slack_ratio + MORE_LOAD_RATIO
    outcome = solve_objective(
        evidence,
        goal=spec.goal.model_copy(update={"traffic_slack_ratio": slack}),
        ranks=spec.ranks,
        rule=rule,
        active_load=0.0,
        migration=None,
        time_limit_s=limit_s,
    )
    if outcome.solution is not None:
        yield f"traffic_slack_ratio {slack:.2f}", outcome.objective


def _more_room(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    migration: Migration | None,
    limit_s: float,
) -> Iterator[tuple[str, float]]:
    if migration is not None:
        wider = Migration(current=migration.current, most_moved=2 * migration.most_moved + 1)
        yield from _solved(
            spec, evidence, spec.ranks, wider, limit_s, f"{wider.most_moved} experts moved"
        )
        return
    more = _one_more_slot(spec.ranks)
    redundant = more.num_slots - spec.num_experts
    yield from _solved(
        spec, evidence, more, None, limit_s, f"one more slot a rank ({redundant} redundant)"
    )


def _one_more_slot(ranks: Ranks) -> Ranks:
    return replace(ranks, slots_G=ranks.slots_G + 1)


def _solved(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    ranks: Ranks,
    migration: Migration | None,
    limit_s: float,
    change: str,
) -> Iterator[tuple[str, float]]:
    problem = balance_problem(evidence, goal=spec.goal, ranks=ranks, migration=migration)
    outcome = BALANCE.solve(problem, time_limit_s=limit_s)
    if outcome.solution is not None:
        yield change, outcome.objective
