"""The plan's fields on memory headroom, where a plan over pools may run out of memory.

The decision with headroom may run on other pools than the plan's, or on a single one.
"""

import math
from collections.abc import Sequence

from tuner.plans.train import Plan, Roomier, TrainPrediction
from tuner.search.train.memory_risk import SMALL, loss_prices
from tuner.search.train.pools.build_problem import PoolsProblem
from tuner.search.train.pools.candidate_order import Ranking
from tuner.search.train.pools.risk import PoolsDecision, decision_with_headroom
from tuner.search.train.pools.search import PoolsSearchOutcome
from tuner.search.train.pools.single_pool import SinglePoolDecision
from tuner.search.train.pools.to_plan import chain_memory_risk, rank_at_risk, to_decision


def headroom_fields(
    ranking: Ranking, outcome: PoolsSearchOutcome, best: PoolsDecision, predicted: TrainPrediction
) -> dict[str, Roomier | bool | float | None]:
    """Return the cost of a decision with headroom, where the plan's may run out of memory.

    Also up to which step the search for it is complete, and whether it is complete.
    """
    if (predicted.out_of_memory_probability or 0.0) <= SMALL:
        return {}
    one = decision_with_headroom(ranking.risks)
    complete_s = ranking.complete_s
    ratio = 0.0 if complete_s is None else complete_s / predicted.step_time_s - 1.0
    return {
        "roomier": None if one is None else _roomier(one, best, predicted, outcome),
        "no_roomier": one is None and complete_s is not None and math.isinf(complete_s),
        "roomier_within_ratio": ratio if 0.0 < ratio < math.inf else None,
    }


def _roomier(
    one: PoolsDecision, best: PoolsDecision, predicted: TrainPrediction, outcome: PoolsSearchOutcome
) -> Roomier:
    problem, options, pools = outcome.problem, outcome.space.options, used_pools(one)
    slower_ratio = max(0.0, one.objective_s / predicted.step_time_s - 1.0)
    run_s = loss_prices(problem.specs[0].goal).run_s(predicted.step_time_s)
    cost = {
        "step_time_s": one.objective_s,
        "slower_ratio": slower_ratio,
        "slower_s": slower_ratio * run_s,
        "pools": () if set(pools) == set(used_pools(best)) else _names(pools, problem),
    }
    if isinstance(one, SinglePoolDecision):
        where = {
            "decision": one.decision,
            "peak_memory_bytes": one.peak_bytes,
            "out_of_memory_probability": one.risk.out_of_memory_probability,
        }
    else:
        at_risk = rank_at_risk(one.chain, problem)
        where = {
            "decision": to_decision(one.chain, problem, options),
            "peak_memory_bytes": at_risk.peak_memory_bytes,
            "out_of_memory_probability": chain_memory_risk(
                one.chain, problem
            ).out_of_memory_probability,
            "rank_at_risk": at_risk,
        }
    return Roomier.model_validate(cost | where)


def used_pools(one: PoolsDecision) -> tuple[int, ...]:
    """Positions of the pools that a decision runs on, in the order of its stages."""
    return (
        (one.index,)
        if isinstance(one, SinglePoolDecision)
        else tuple(dict.fromkeys(one.chain.pool_S))
    )


def _names(pools: Sequence[int], problem: PoolsProblem) -> tuple[str, ...]:
    return tuple(problem.cluster.pools[index].name for index in pools)


def with_headroom_on_other_pools(plan: Plan, ranking: Ranking, outcome: PoolsSearchOutcome) -> Plan:
    """Add to a single-pool plan the decision with headroom on any pools, if it is faster."""
    best, predicted = ranking.best, plan.predicted
    if best is None or predicted is None:
        return plan
    room = headroom_fields(ranking, outcome, best, predicted)
    elsewhere = room.get("roomier")
    is_slower = not isinstance(elsewhere, Roomier) or (
        plan.roomier is not None and plan.roomier.step_time_s <= elsewhere.step_time_s
    )
    return plan if plan.roomier is not None and is_slower else plan.model_copy(update=room)
