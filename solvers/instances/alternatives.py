"""Near-optimal alternatives to the chosen plan, lightest first.

An alternative serves no less than the chosen plan, or for RATE no less within the band, weighs at
most the band more, and has no instance that it could do without (no plan among them contains
another). Weights are those of the objective, devices for RATE. They are found one by one, by
Benders' decomposition (Numerische Mathematik 4, 1962):

    1. find the lightest counts under the cuts so far (`counts.py`);
    2. route as many requests as these counts can serve (`flows.py`): a plan and a cut;
    3. where that is too few, add the cut and go back to 1; otherwise exclude the plan and all that
       contain it. Because the lightest comes first, none is missed: an excluded plan contains one
       that was found.

A cut leaves out the counts that it came from, so it ends. Only undominated columns are used
(`dominance.py`).
"""

import time
from dataclasses import dataclass

from solvers.instances.counts import CountsModel
from solvers.instances.dominance import undominated
from solvers.instances.flows import at_lower_rate, first_cuts, max_flow_plan
from solvers.instances.problem import SHORTFALL_RATIO, InstancePlan, InstancesProblem
from solvers.result import Status

WHOLE = 1.0 - SHORTFALL_RATIO
"""Factor just below 1 on the limits, so that rounding does not cut off the chosen plan."""

AGREEMENT_RATIO = 1e-7
"""Largest relative distance of the counts' limit from what they serve: above the rounding to
units."""

COARSEST_STEPS, FINER, FINEST_STEPS = 10**4, 10**3, 10**10
"""Units in the least rate: coarse, since that is fast, until they hide a cut; the finest round by
far less than 1e-7."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternatives:
    """Plans within a band of the chosen one, which is among them."""

    plans: tuple[InstancePlan, ...]
    """Plans in ascending order of weight."""
    is_complete: bool
    """These are all plans within the band."""


def alternatives(
    problem: InstancesProblem,
    chosen: InstancePlan,
    *,
    band_ratio: float,
    max_plans: int,
    time_limit_s: float,
    threads: int = 1,
) -> Alternatives:
    """Find up to `max_plans` plans whose objective exceeds the chosen by `band_ratio` at most."""
    deadline_s = time.perf_counter() + time_limit_s
    columns, least = undominated(problem), problem.least_per_s
    rate_is_free = not problem.objective.rate_is_fixed
    if rate_is_free:
        least = max(least, chosen.rate_per_s / (1.0 + band_ratio) * WHOLE)
    weight = sum(w * n for w, n in zip(problem.weight_J, chosen.count_J, strict=True))
    most_weight = None if rate_is_free else weight * (1.0 + band_ratio) / WHOLE
    cuts, steps = list(first_cuts(problem)), COARSEST_STEPS
    seen: set[tuple[int, ...]] = set()
    listed: list[InstancePlan] = []
    while len(listed) < max_plans and (left_s := deadline_s - time.perf_counter()) > 0.0:
        model = CountsModel(problem, columns, most_weight=most_weight)
        for cut in cuts:
            model.add_cut(cut, least_per_s=least, unit_per_s=least / steps)
        for plan in listed:
            model.forbid_as_many(plan.count_J)
        status, count_J = model.run(time_limit_s=left_s, threads=threads)
        if status is Status.INFEASIBLE:
            return Alternatives(plans=tuple(listed), is_complete=True)
        if status is not Status.OPTIMAL:
            break
        if count_J in seen:
            steps = min(steps * FINER, FINEST_STEPS)
        seen.add(count_J)
        served = max_flow_plan(problem, count_J)
        if served.plan.rate_per_s < least * (1.0 - AGREEMENT_RATIO):
            cuts.append(served.cut)
        else:
            listed.append(served.plan if rate_is_free else at_lower_rate(served.plan, least))
    return Alternatives(plans=tuple(listed), is_complete=False)
