"""Counts by OR-Tools' CP-SAT, flows by a linear program, joined by cuts: Benders' decomposition.

    1. find counts that are best under the cuts so far (`counts.py`): a lower bound;
    2. route as many requests as these counts can serve (`flows.py`): a plan and a cut;
    3. where that is less than the model assumed, add the cut and go back to 1.

Where a rate is rewarded, 1 asks for counts that beat the best plan so far by the tolerance, until
there are none.

Source: Benders, Numerische Mathematik 4, 1962. A cut leaves out the counts that it came from, so it
ends; without links that bind the first cuts suffice. Dominated columns are removed
first (`dominance.py`), objectives become linear programs (`linear.py`). Proves optimality
within 1e-7, and infeasibility; the second opinion on `milp.py`, with which it shares only these.
Where a rate is rewarded it proves nothing before it ends, and ratios over thousands of devices end
at the time limit: choose `milp` there.
"""

import math
import time

from solvers.instances.counts import CountsModel
from solvers.instances.dominance import undominated
from solvers.instances.flows import at_lower_rate, first_cuts, max_flow_plan
from solvers.instances.linear import Linear, solve_by
from solvers.instances.problem import InstancePlan, InstancesProblem
from solvers.result import Claim, Status

AGREEMENT_RATIO = 1e-7
"""How near the counts' limit and what they serve must come: above the rounding to whole units."""

COARSEST_STEPS, FINER, FINEST_STEPS = 10**4, 10**3, 10**10
"""Units of rates in the rate about which plans lie; the finest round by far less than 1e-7."""

LEAST_UNIT_RATIO = 1e-3
"""Of what the columns could serve if each had all pools: rates are in units of no less."""


def solve(
    problem: InstancesProblem, *, time_limit_s: float, threads: int = 1
) -> Claim[InstancePlan]:
    """Return the best plan with a proven lower bound on the objective."""
    deadline_s = time.perf_counter() + time_limit_s
    columns = undominated(problem)
    if not columns:
        return Claim(status=Status.INFEASIBLE, solution=None, bound=math.inf)

    def solve_linear(linear: Linear) -> Claim[InstancePlan]:
        return _by_cuts(problem, columns, linear, deadline_s, threads)

    return solve_by(problem, solve_linear)


def size_per_s(problem: InstancesProblem, columns: tuple[int, ...], linear: Linear) -> float:
    """About the rate that plans will have."""
    reach_per_s = sum(problem.most_instances(j) * problem.columns[j].rate_per_s for j in columns)
    return max(linear.least_per_s, LEAST_UNIT_RATIO * reach_per_s)


class Units:
    """The unit of rates in a model: coarse, since that is fast, until it hides a cut."""

    def __init__(self, size_per_s: float) -> None:
        self.size_per_s, self.steps = size_per_s, COARSEST_STEPS
        self._seen: set[tuple[int, ...]] = set()

    @property
    def unit_per_s(self) -> float:
        """Requests/s."""
        return self.size_per_s / self.steps

    def watch(self, count_J: tuple[int, ...]) -> None:
        """Go finer when counts come back although a cut was made for them."""
        if count_J in self._seen:
            self.steps = min(self.steps * FINER, FINEST_STEPS)
        self._seen.add(count_J)


def _by_cuts(
    problem: InstancesProblem,
    columns: tuple[int, ...],
    linear: Linear,
    deadline_s: float,
    threads: int,
) -> Claim[InstancePlan]:
    size = size_per_s(problem, columns, linear)
    cuts = list(first_cuts(problem))
    best, best_value, bound = None, math.inf, -math.inf
    units = Units(size)
    while (left_s := deadline_s - time.perf_counter()) > 0.0:
        target = best_value
        if best is not None:
            target -= AGREEMENT_RATIO * max(abs(best_value), linear.reward * size)
        model = CountsModel(problem, columns, linear, size_per_s=size, unit_per_s=units.unit_per_s)
        for cut in cuts:
            model.add_cut(cut)
        if best is not None:
            model.add_target(cuts, at_most=target)
        counted = model.run(time_limit_s=left_s, threads=threads)
        if counted.status is Status.INFEASIBLE:
            status = Status.INFEASIBLE if best is None else Status.OPTIMAL
            return Claim(status=status, solution=best, bound=target)
        bound = max(bound, counted.bound)
        if not counted.status.has_solution:
            break
        units.watch(counted.count_J)
        served = max_flow_plan(problem, counted.count_J)
        cuts.append(served.cut)
        if served.plan.rate_per_s < linear.least_per_s * (1.0 - AGREEMENT_RATIO):
            continue
        if not linear.reward:
            plan = at_lower_rate(served.plan, linear.least_per_s)
            return Claim(status=counted.status, solution=plan, bound=bound)
        value = _value(linear, served.plan)
        if value < best_value:
            best, best_value = served.plan, value
    status = Status.UNKNOWN if best is None else Status.FEASIBLE
    return Claim(status=status, solution=best, bound=min(bound, best_value))


def _value(linear: Linear, plan: InstancePlan) -> float:
    weights = sum(w * count for w, count in zip(linear.weight_J, plan.count_J, strict=True))
    return weights - linear.reward * plan.rate_per_s
