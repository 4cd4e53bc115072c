"""Leave-one-out: plans without one workload, evaluated on it."""

from collections.abc import Sequence
from typing import Final

from solvers.placement.balance.problem import Migration
from tuner.plans.place import LeftOut
from tuner.search.place.candidates import eplb_baseline, solve_objective
from tuner.search.place.comparison import placement_ranks
from tuner.search.place.cost import active_load_of
from tuner.search.place.evaluation import evaluate
from tuner.search.place.evidence import WorkloadEvidence
from tuner.search.place.links import LinkCosts
from tuner.search.place.prices import Pricing
from tuner.search.place.traffic import traffic_on
from tuner.search.place.transitions import Tokens
from tuner.search.settings import Deadline
from tuner.spec.place_read import PlaceSpec

MOST_FOLDS: Final = 12


def leave_one_out(
    spec: PlaceSpec,
    evidence: Sequence[WorkloadEvidence],
    pricing: Pricing | None,
    dispatch: str,
    migration: Migration | None,
    links: LinkCosts,
    *,
    deadline: Deadline,
    time_limit_s: float,
    evaluation_s: float = 0.0,
) -> tuple[tuple[LeftOut, ...], tuple[float, ...]]:
    """Plan without each workload in turn and evaluate on all of its passes.

    Only the first `MOST_FOLDS` workloads, and as many as the time allows. Also return, for each,
    the worst layer's imbalance without a plan.

    Args:
        spec: what to plan.
        evidence: every workload.
        pricing: of time; None: loads count.
        dispatch: the dispatch rule.
        migration: the limit on moved experts.
        links: that traffic is priced on.
        deadline: after which no further plan is started.
        time_limit_s: of all searches together.
        evaluation_s: estimated time to evaluate one plan.
    """
    if len(evidence) < 2:
        return (), ()
    folds, worst = [], []
    limit_s = time_limit_s / min(len(evidence), MOST_FOLDS)
    took_s = evaluation_s
    for one in evidence[:MOST_FOLDS]:
        started_s = deadline.clock()
        if deadline.left_s <= took_s:
            break
        others = [other for other in evidence if other is not one]
        baseline = eplb_baseline(
            others, ranks=spec.ranks, groups=spec.goal.expert_groups, dispatch=dispatch
        )
        allowed_s = min(limit_s, deadline.left_s)
        if allowed_s <= 0.0:
            break  # The baseline took what was left.
        outcome = solve_objective(
            others,
            goal=spec.goal,
            ranks=spec.ranks,
            baseline=baseline,
            dispatch=dispatch,
            links=links,
            active_load=active_load_of(spec.goal, pricing),
            migration=migration,
            time_limit_s=allowed_s,
        )
        if outcome.solution is None:
            continue
        after, eplb, before = (
            evaluate(
                placement,
                load_PLE=one.whole_PLE,
                ranks=placement_ranks(spec, placement),
                dispatch=dispatch,
            )
            for placement in (outcome.solution, baseline.placement, spec.current)
        )
        folds.append(
            LeftOut(
                workload=one.name,
                imbalance_after=after.imbalance,
                imbalance_rule=eplb.imbalance,
                imbalance_before=before.imbalance,
                worst_rank_ratio=after.worst_ratio,
                traffic=traffic_on(
                    spec, (one,), outcome.solution, baseline, links, tokens=Tokens.ALL
                ),
            )
        )
        worst.append(before.worst_ratio)
        took_s = deadline.clock() - started_s
    return tuple(folds), tuple(worst)


def leave_one_out_note(
    evidence: Sequence[WorkloadEvidence], folds: Sequence[LeftOut]
) -> tuple[str, ...]:
    """Return a note on the workloads for which the time was too short; empty: none."""
    made = {fold.workload for fold in folds}
    missing = [one.name for one in evidence[:MOST_FOLDS] if one.name not in made]
    if len(evidence) < 2 or not missing:
        return ()
    names = ", ".join(map(repr, missing))
    return (f"no plan was made without {names} in the time limit; give more with --time-limit",)
