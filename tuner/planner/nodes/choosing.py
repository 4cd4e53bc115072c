"""A runner-up in the place of the chosen decision, where slow links hurt that one more.

The search takes every link for the usual one, so among its best may be one that sends less over
the links that are slow. The runners-up that a plan lists are priced with their best order each; one
that could not win even with the solver's lower bound on its slow links is passed over. What the
certificate is about stays the fastest decision with usual links.

Not covered: decisions that the plan does not list; chains over several pools.
"""

from typing import Final

from profilers.imports.link_matrix import LinkMatrix
from tuner.plan import Alternative, Plan, Preference, TrainDecision, TrainPrediction
from tuner.planner.nodes.ordering import Ordered, least_slow_s, order_nodes
from tuner.planner.nodes.slowing import slowed
from tuner.planner.nodes.traffic import Traffic, obstacle, traffic
from tuner.spec.cluster import Pool
from tuner.units import format_s

LEAST_GAIN_RATIO: Final = 0.01
"""Share of a step that another decision must save to take the chosen one's place."""


def least_hurt(plan: Plan, links: LinkMatrix, *, pool: Pool, time_limit_s: float) -> Plan:
    """Return the plan with the decision that is fastest on these links, often as it is.

    Args:
        plan: of one pool, with a decision.
        links: of the pool's nodes.
        pool: of the spec.
        time_limit_s: for all orders that are tried.
    """
    own = _ordered(plan, plan.decision, plan.predicted, links, pool, time_limit_s / 2.0)
    if own is None or plan.predicted is None:
        return plan
    total_s = plan.predicted.step_time_s + own.slow_s
    best_s, best = total_s * (1.0 - LEAST_GAIN_RATIO), None
    share_s = time_limit_s / 2.0 / max(1, len(plan.alternatives))
    for other in plan.alternatives:
        step_s = other.predicted.step_time_s
        sent = _traffic(plan, other.decision, other.predicted, pool)
        if sent is None or step_s + least_slow_s(sent, links, pool=pool) >= best_s:
            continue
        found = order_nodes(sent, links, pool=pool, time_limit_s=share_s)
        if step_s + found.slow_s < best_s:
            best_s, best = step_s + found.slow_s, (other, found)
    return plan if best is None else _instead(plan, own, *best)


def _instead(plan: Plan, own: Ordered, other: Alternative, found: Ordered) -> Plan:
    """Put a runner-up where the decision was, and the decision among the runners-up."""
    assert plan.decision is not None
    assert plan.predicted is not None
    former = plan.preferred
    fastest_s = plan.predicted.step_time_s if former is None else former.fastest_step_s
    lost = f"{format_s(found.slow_s)} a step lost to slow links, not {format_s(own.slow_s)}"
    left = Alternative(
        decision=plan.decision,
        predicted=slowed(plan.predicted, own.slow_s),
        within_band=other.within_band,
        lost_by=f"slow links: {format_s(own.slow_s)}",
    )
    bound_s = plan.certificate.bound or 0.0
    gap_ratio = max(0.0, 1.0 - bound_s / other.predicted.step_time_s)
    return plan.model_copy(
        update={
            "decision": other.decision,
            "predicted": other.predicted,
            "alternatives": (left, *(one for one in plan.alternatives if one is not other)),
            "preferred": Preference(
                fastest=plan.decision if former is None else former.fastest,
                fastest_step_s=fastest_s,
                slower_ratio=max(0.0, other.predicted.step_time_s / fastest_s - 1.0),
                reasons=(lost,),
            ),
            "certificate": plan.certificate.model_copy(update={"decision_gap_ratio": gap_ratio}),
        }
    )


def _ordered(
    plan: Plan,
    decision: TrainDecision | None,
    predicted: TrainPrediction | None,
    links: LinkMatrix,
    pool: Pool,
    time_limit_s: float,
) -> Ordered | None:
    """The best order for a decision; None where its nodes cannot be put in order."""
    if decision is None or predicted is None:
        return None
    sent = _traffic(plan, decision, predicted, pool)
    if sent is None:
        return None
    return order_nodes(sent, links, pool=pool, time_limit_s=time_limit_s)


def _traffic(
    plan: Plan, decision: TrainDecision, predicted: TrainPrediction, pool: Pool
) -> Traffic | None:
    if obstacle(decision, pool):
        return None
    return traffic(
        decision,
        predicted,
        model=plan.model,
        goal=plan.goal,
        pool=pool,
        ranks=range(decision.pipeline_model_parallel_size),
    )
