"""What more room would cost where a plan over pools may run out of memory, in the words of a plan.

The decision with room may run on other pools than the plan's, or on one of them alone.
"""

import math
from collections.abc import Sequence

from tuner.plan import Plan, Roomier, TrainPrediction
from tuner.planner.analytic.memory_risk import SMALL, loss_prices
from tuner.planner.heterogeneous.build_problem import PoolsQuestion
from tuner.planner.heterogeneous.candidate_order import Ranking
from tuner.planner.heterogeneous.risk import Decided, fastest_with_room
from tuner.planner.heterogeneous.search import Search
from tuner.planner.heterogeneous.single_pool import DecisionAlone
from tuner.planner.heterogeneous.to_plan import decision_of, rank_at_risk, risk_of


def room_of(
    ranking: Ranking, found: Search, best: Decided, predicted: TrainPrediction
) -> dict[str, Roomier | bool | float | None]:
    """Say what hardly running out of memory would cost, where the plan's decision may run out.

    Also up to which step that was searched for, and whether everything was.
    """
    if (predicted.out_of_memory_probability or 0.0) <= SMALL:
        return {}
    one = fastest_with_room(ranking.risks)
    complete_s = ranking.complete_s
    ratio = 0.0 if complete_s is None else complete_s / predicted.step_time_s - 1.0
    return {
        "roomier": None if one is None else _roomier(one, best, predicted, found),
        "no_roomier": one is None and complete_s is not None and math.isinf(complete_s),
        "roomier_within_ratio": ratio if 0.0 < ratio < math.inf else None,
    }


def _roomier(one: Decided, best: Decided, predicted: TrainPrediction, found: Search) -> Roomier:
    question, ways, pools = found.question, found.space.ways, pools_of(one)
    slower_ratio = max(0.0, one.objective_s / predicted.step_time_s - 1.0)
    run_s = loss_prices(question.specs[0].goal).run_s(predicted.step_time_s)
    cost = {
        "step_time_s": one.objective_s,
        "slower_ratio": slower_ratio,
        "slower_s": slower_ratio * run_s,
        "pools": () if set(pools) == set(pools_of(best)) else _names(pools, question),
    }
    if isinstance(one, DecisionAlone):
        where = {
            "decision": one.decision,
            "peak_memory_bytes": one.peak_bytes,
            "out_of_memory_probability": one.risk.out_of_memory_probability,
        }
    else:
        at_risk = rank_at_risk(one.chain, question)
        where = {
            "decision": decision_of(one.chain, question, ways),
            "peak_memory_bytes": at_risk.peak_memory_bytes,
            "out_of_memory_probability": risk_of(one.chain, question).out_of_memory_probability,
            "rank_at_risk": at_risk,
        }
    return Roomier.model_validate(cost | where)


def pools_of(one: Decided) -> tuple[int, ...]:
    """Positions of the pools that run it, in the order of its stages."""
    return (
        (one.index,) if isinstance(one, DecisionAlone) else tuple(dict.fromkeys(one.chain.pool_S))
    )


def _names(pools: Sequence[int], question: PoolsQuestion) -> tuple[str, ...]:
    return tuple(question.cluster.pools[index].name for index in pools)


def with_room_elsewhere(plan: Plan, ranking: Ranking, found: Search) -> Plan:
    """Say of a plan on one pool what has more room on any."""
    best, predicted = ranking.best, plan.predicted
    if best is None or predicted is None:
        return plan
    room = room_of(ranking, found, best, predicted)
    elsewhere = room.get("roomier")
    is_slower = not isinstance(elsewhere, Roomier) or (
        plan.roomier is not None and plan.roomier.step_time_s <= elsewhere.step_time_s
    )
    return plan if plan.roomier is not None and is_slower else plan.model_copy(update=room)
