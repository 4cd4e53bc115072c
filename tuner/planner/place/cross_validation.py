"""Plans without one of the workloads, judged on it: what a plan does to traffic it has not seen."""

from collections.abc import Sequence
from typing import Final

from solvers.placement.balance.problem import Migration
from tuner.place_plan import LeftOut
from tuner.planner.place.candidates import rule_of, solve_objective
from tuner.planner.place.comparison import ranks_of, sources_of
from tuner.planner.place.cost import active_load_of
from tuner.planner.place.deadline import Deadline
from tuner.planner.place.evaluation import judge
from tuner.planner.place.evidence import WorkloadEvidence
from tuner.planner.place.known_table import counts_on_table, on_table
from tuner.planner.place.links import LinkCosts
from tuner.planner.place.prices import Pricing
from tuner.planner.place.sampled import Tokens
from tuner.planner.place.traffic import traffic_on
from tuner.spec.place_read import PlaceSpec

MOST_FOLDS: Final = 12


def left_out(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    pricing: Pricing | None,
    dispatch: str,
    migration: Migration | None,
    links: LinkCosts,
    *,
    deadline: Deadline,
    time_limit_s: float,
    judging_s: float = 0.0,
) -> tuple[tuple[LeftOut, ...], tuple[float, ...]]:
    """Plan without each workload in turn and judge on all of its passes.

    The first workloads are, where there are more than `MOST_FOLDS`, or where the time is up. Beside
    each stands the worst layer's ratio without a plan.

    Args:
        spec: the question.
        evidence: every workload.
        pricing: of time, where it is priced.
        dispatch: the rule.
        migration: the limit on moved experts.
        links: that traffic is priced on.
        deadline: after which no other plan is begun.
        time_limit_s: for the searches of all of them.
        judging_s: what judging one takes, as far as is known before the first.
    """
    if len(evidence) < 2:
        return (), ()
    folds, worst = [], []
    limit_s = time_limit_s / min(len(evidence), MOST_FOLDS)
    took_s = judging_s
    for one in evidence[:MOST_FOLDS]:
        started_s = deadline.clock()
        if deadline.left_s <= took_s:
            break
        others = [other for other in evidence if other is not one]
        rule = rule_of(others, ranks=spec.ranks, groups=spec.goal.expert_groups, dispatch=dispatch)
        outcome = solve_objective(
            others,
            goal=spec.goal,
            ranks=spec.ranks,
            rule=rule,
            dispatch=dispatch,
            links=links,
            active_load=active_load_of(spec.goal, pricing),
            migration=migration,
            time_limit_s=min(limit_s, deadline.left_s),
            on_table=on_table if counts_on_table(spec, dispatch) else None,
        )
        if outcome.solution is None:
            continue
        after, by_rule, before = (
            judge(
                placement,
                load_PLE=one.whole_PLE,
                ranks=ranks_of(spec, placement),
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
                traffic=traffic_on(spec, [one], outcome.solution, rule, links, tokens=Tokens.ALL),
            )
        )
        worst.append(before.worst_ratio)
        took_s = deadline.clock() - started_s
    return tuple(folds), tuple(worst)


def left_out_note(
    evidence: Sequence[WorkloadEvidence], folds: Sequence[LeftOut]
) -> tuple[str, ...]:
    """Say in a line which workloads were left out of no plan that was asked for."""
    made = {fold.workload for fold in folds}
    missing = [one.name for one in evidence[:MOST_FOLDS] if one.name not in made]
    if len(evidence) < 2 or not missing:
        return ()
    names = ", ".join(map(repr, missing))
    return (f"no plan was made without {names} in the time limit; give more with --time-limit",)
