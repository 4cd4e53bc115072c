"""Near-optimal alternatives to the chosen plan, lightest first.

An alternative serves no less than the chosen plan, or for RATE no less within the band, weighs at
most the band more, and has no instance that it could do without (no plan among them contains
another). Weights are those of the objective, devices for RATE. They are found one by one by the
cuts of `cp_sat.py`; each found plan, and all that contain it, are then excluded. Because the
lightest comes first, none is missed: an excluded plan contains one that was found.

Only undominated columns are used (`dominance.py`).
"""

import math
import time
from dataclasses import dataclass

from solvers.instances.counts import CountsModel
from solvers.instances.cp_sat import AGREEMENT_RATIO, Units, size_per_s
from solvers.instances.dominance import undominated
from solvers.instances.flows import at_lower_rate, first_cuts, max_flow_plan
from solvers.instances.linear import WHOLE, Linear, least_per_s
from solvers.instances.problem import InstanceObjective, InstancePlan, InstancesProblem
from solvers.result import Status


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """Plans within a band of the chosen one, which is among them."""

    plans: tuple[InstancePlan, ...]
    """By weight."""
    is_complete: bool
    """Whether these are all."""


def alternatives(
    problem: InstancesProblem,
    chosen: InstancePlan,
    *,
    band_ratio: float,
    most: int,
    time_limit_s: float,
    threads: int = 1,
) -> Alternatives:
    """Find up to `most` plans whose objective exceeds the chosen plan's by `band_ratio` at most."""
    deadline_s = time.perf_counter() + time_limit_s
    columns = undominated(problem)
    linear = _alternatives_program(problem, chosen, band_ratio=band_ratio)
    limit = math.inf
    if problem.objective is not InstanceObjective.RATE:
        limit = _weight(linear, chosen) * (1.0 + band_ratio) / WHOLE
    size = size_per_s(problem, columns, linear)
    units, cuts = Units(size), list(first_cuts(problem))
    listed: list[InstancePlan] = []
    while len(listed) < most and (left_s := deadline_s - time.perf_counter()) > 0.0:
        model = CountsModel(problem, columns, linear, size_per_s=size, unit_per_s=units.unit_per_s)
        for cut in cuts:
            model.add_cut(cut)
        for plan in listed:
            model.forbid_as_many(plan.count_J)
        counted = model.run(time_limit_s=left_s, threads=threads)
        if counted.status is Status.INFEASIBLE or counted.bound > limit:
            return Alternatives(plans=tuple(listed), is_complete=True)
        if counted.status is not Status.OPTIMAL:
            break
        units.watch(counted.count_J)
        served = max_flow_plan(problem, counted.count_J)
        if served.plan.rate_per_s < linear.least_per_s * (1.0 - AGREEMENT_RATIO):
            cuts.append(served.cut)
            continue
        if _weight(linear, served.plan) > limit:
            return Alternatives(plans=tuple(listed), is_complete=True)
        rate_is_free = problem.objective is InstanceObjective.RATE
        listed.append(
            served.plan if rate_is_free else at_lower_rate(served.plan, linear.least_per_s)
        )
    return Alternatives(plans=tuple(listed), is_complete=False)


def _alternatives_program(
    problem: InstancesProblem, chosen: InstancePlan, *, band_ratio: float
) -> Linear:
    match problem.objective:
        case InstanceObjective.COST | InstanceObjective.DEVICES:
            rate_per_s = least_per_s(problem)
        case InstanceObjective.RATE:
            rate_per_s = max(least_per_s(problem), chosen.rate_per_s / (1.0 + band_ratio) * WHOLE)
        case InstanceObjective.DEVICE_TIME | InstanceObjective.SPENDING:
            rate_per_s = chosen.rate_per_s * WHOLE
    return Linear(weight_J=problem.weight_J, reward=0.0, least_per_s=rate_per_s)


def _weight(linear: Linear, plan: InstancePlan) -> float:
    return sum(w * count for w, count in zip(linear.weight_J, plan.count_J, strict=True))
