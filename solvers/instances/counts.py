"""Counts of instances under pools, kinds and cuts, as integers for OR-Tools' CP-SAT.

The flows of `problem.py` are replaced by the cuts of `flows.py`, upper limits on what counts can
serve. Every feasible plan satisfies every cut, so a solution of this model is a lower bound of the
problem. Rates become multiples of a unit, rounded so that nothing feasible is lost;
weights likewise, rounded down. One thread and a fixed seed give the same result every time, unless
the time limit ends the search. An interrupt stops the search and is re-raised.

Where a rate is rewarded the objective only guides the search, in coarse units, since fine ones are
slow. Proven there is that no counts reach a target.

Letters: J columns.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction

from ortools.sat.python import cp_model

from solvers.cp_sat import run_cp_sat
from solvers.instances.flows import Cut
from solvers.instances.linear import Linear
from solvers.instances.problem import InstancesProblem
from solvers.result import Status

WEIGHT_STEPS = 10**9
"""Units in the largest weight where weights are no decimals."""

LARGEST_DENOMINATOR = 10**4
"""Prices have four decimals at most."""

EXACT_RATIO = 1e-12
"""Closer than this two weights are one."""

GUIDE_STEPS = 10**3
"""Units in the rate about which plans lie, in the objective that leads where a rate is rewarded."""

GUIDE_LIMIT = 10**9
"""No objective is further from zero, in those units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """What one search found."""

    status: Status
    count_J: tuple[int, ...]
    """Of all columns; empty without a solution."""
    bound: float
    """On the weights, true for the whole problem; `-inf` where a rate is rewarded."""


class CountsModel:
    """Counts whose rate the cuts allow; a resource of one solve."""

    def __init__(
        self,
        problem: InstancesProblem,
        columns: tuple[int, ...],
        linear: Linear,
        *,
        size_per_s: float,
        unit_per_s: float,
    ) -> None:
        self.problem, self.columns, self.linear = problem, columns, linear
        self.model = cp_model.CpModel()
        self.count_J = {
            j: self.model.new_int_var(0, problem.most_instances(j), f"n{j}") for j in columns
        }
        for number, pool in enumerate(problem.pools):
            taken = {j: float(problem.columns[j].devices_P[number]) for j in columns}
            self.model.add(self._whole(taken, unit=1.0) <= pool.devices)
        self._limit_kinds()
        self.unit_per_s = unit_per_s
        self.guide_unit_per_s = size_per_s / GUIDE_STEPS
        self.guide = self._minimise()

    def _whole(self, slope_J: Mapping[int, float], *, unit: float) -> cp_model.LinearExpr:
        """The sum of slopes times counts in whole units, never more than the sum itself."""
        return cp_model.LinearExpr.weighted_sum(
            list(self.count_J.values()), [math.floor(slope_J[j] / unit) for j in self.columns]
        )

    def _limit_kinds(self) -> None:
        problem = self.problem
        if problem.max_kinds is None:
            return
        for _, columns in problem.kinds():
            used = []
            for j in columns:
                if j in self.count_J:
                    idle = self.model.new_bool_var(f"idle{j}")
                    self.model.add(self.count_J[j] == 0).only_enforce_if(idle)
                    used.append(~idle)
            self.model.add(cp_model.LinearExpr.sum(used) <= problem.max_kinds)

    def _minimise(self) -> cp_model.IntVar | None:
        linear = self.linear
        weight_J = {j: linear.weight_J[j] for j in self.columns}
        if not linear.reward:
            self.weight_unit = common_unit(tuple(weight_J.values()))
            self.model.minimize(self._whole(weight_J, unit=self.weight_unit))
            return None
        guide = self.model.new_int_var(-GUIDE_LIMIT, GUIDE_LIMIT, "guide")
        self.model.minimize(guide)
        return guide

    def add_cut(self, cut: Cut) -> None:
        """Require that the cut allows the least rate."""
        slope_J = {j: -cut.slope_J[j] for j in self.columns}
        least = (self.linear.least_per_s - cut.constant) / self.unit_per_s
        self.model.add(self._whole(slope_J, unit=self.unit_per_s) <= -math.floor(least))
        if self.guide is not None:
            value, constant, unit = self._value(cut, unit_per_s=self.guide_unit_per_s)
            self.model.add(value - math.ceil(constant / unit) <= self.guide)

    def add_target(self, cuts: Iterable[Cut], *, at_most: float) -> None:
        """Require an objective of at most this much, under the prices of these cuts."""
        for cut in cuts:
            value, constant, unit = self._value(cut, unit_per_s=self.unit_per_s)
            self.model.add(value <= math.ceil((at_most + constant) / unit))

    def _value(self, cut: Cut, *, unit_per_s: float) -> tuple[cp_model.LinearExpr, float, float]:
        """The least objective that the prices allow: whole units, less a constant in true ones."""
        reward = self.linear.reward
        unit = reward * unit_per_s
        slope_J = {j: self.linear.weight_J[j] - reward * cut.slope_J[j] for j in self.columns}
        return self._whole(slope_J, unit=unit), reward * cut.constant, unit

    def forbid_as_many(self, count_J: tuple[int, ...]) -> None:
        """Leave out these counts and all that hold at least as many of every column."""
        fewer = []
        for j, count in self.count_J.items():
            if count_J[j]:
                has_fewer = self.model.new_bool_var("")
                self.model.add(count < count_J[j]).only_enforce_if(has_fewer)
                fewer.append(has_fewer)
        self.model.add_bool_or(fewer)

    def run(self, *, time_limit_s: float, threads: int) -> Counted:
        """Search once.

        Raises:
            BackendFailedError: CP-SAT refuses the model.
        """
        status, solver = run_cp_sat(
            self.model,
            time_limit_s=time_limit_s,
            threads=threads,
            other_method="milp",
            linearization_level=2,  # relaxations of these models are nearly tight
        )
        if status is Status.INFEASIBLE:
            return Counted(status=status, count_J=(), bound=math.inf)
        bound = -math.inf
        if self.guide is None:
            bound = solver.best_objective_bound * self.weight_unit
        counts = [0] * len(self.problem.columns)
        if status.has_solution:
            for j, count in self.count_J.items():
                counts[j] = int(solver.value(count))
        return Counted(status=status, count_J=tuple(counts), bound=bound)


def common_unit(weights: tuple[float, ...]) -> float:
    """What all weights are whole multiples of, where they are plain decimals; else a fine step."""
    plain = [Fraction(weight).limit_denominator(LARGEST_DENOMINATOR) for weight in weights]
    if any(abs(float(p) - w) > EXACT_RATIO * w for p, w in zip(plain, weights, strict=True)):
        return max(weights) / WEIGHT_STEPS
    denominator = math.lcm(*(one.denominator for one in plain))
    steps = math.gcd(*(int(one * denominator) for one in plain))
    # A hair less, so that no multiple is rounded down to the one below it.
    return steps / denominator * (1.0 - EXACT_RATIO)
