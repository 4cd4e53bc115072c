"""A plan as the outcome of a what-if: the same figures for every change, so that outcomes compare.

Training is compared by tokens per second of all devices (step times do not compare where the batch
or the sequence changes) of the chosen decision, so that nothing is called better whose own numbers
are worse. Among decisions near the fastest a plan prefers the easier one, so a gain may come from
another preference; the fastest is reported too. A deployment is compared by the objective of its
goal, a balanced placement by the share of all token copies on its most-loaded ranks over hold-out
passes (imbalance does not compare where the number of ranks changes), another placement by the
objective of its certificate.
"""

from tuner.goals.goal import Figures, StoredPlan
from tuner.goals.registry import goal_of
from tuner.plans.what_if import WhatIfOutcome


def to_outcome(
    plan: StoredPlan,
    *,
    change: str,
    says: str,
    base: StoredPlan | None,
    solve_s: float,
) -> WhatIfOutcome:
    """Return the outcome of a plan, compared with the unchanged plan."""
    goal = goal_of(plan)
    plan_figures = goal.figures(plan)
    return WhatIfOutcome(
        change=change,
        says=says,
        status=plan.certificate.status,
        reason=_reason(plan),
        num_devices=None if plan.decision is None else plan.decision.num_devices,
        decision="" if plan.decision is None else goal.words(plan.decision),
        decision_changes=_changes(base, plan),
        objective="" if plan_figures is None else plan_figures.objective,
        figures={} if plan_figures is None else plan_figures.values,
        bands={} if plan_figures is None else plan_figures.bands,
        gain_ratio=None
        if base is None or plan_figures is None
        else _gain(plan_figures, goal.figures(base)),
        solve_s=solve_s,
    )


def _reason(plan: StoredPlan) -> str:
    """Name what binds the plan; where nothing fits, with the first relaxation too."""
    change = getattr(next(iter(getattr(plan, "relaxations", ())), None), "change", "")
    if plan.decision is not None or not change:
        return plan.binding_constraint
    return f"{plan.binding_constraint}; nearest relaxation: {change}"


def _changes(base: StoredPlan | None, plan: StoredPlan) -> tuple[str, ...]:
    if base is None or base.decision is None or plan.decision is None:
        return ()
    return goal_of(plan).differences(base.decision, plan.decision)


def _gain(figures: Figures, base: Figures | None) -> float | None:
    if base is None or base.objective != figures.objective:
        return None
    before, after = base.values[figures.objective], figures.values[figures.objective]
    if before <= 0.0 or after <= 0.0:
        return None
    return (after - before if figures.more_is_better else before - after) / before
