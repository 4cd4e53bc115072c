"""Counts of instances under pools, kinds and cuts, as integers for OR-Tools' CP-SAT.

The flows of `problem.py` are replaced by the cuts of `flows.py`, upper limits on what counts can
serve. Every feasible plan satisfies every cut, so a solution of this model is a lower bound of the
problem. Rates become multiples of a unit, rounded so that nothing feasible is lost;
weights likewise, rounded down. One thread and a fixed seed give the same result every time, unless
the time limit ends the search. An interrupt stops the search and is re-raised.

Letters: J columns.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from ortools.sat.python import cp_model

from solvers.cp_sat import run_cp_sat
from solvers.instances.flows import Cut
from solvers.instances.problem import InstancesProblem
from solvers.result import Status

WEIGHT_STEPS = 10**9
"""Units in the largest weight where weights are no decimals."""

LARGEST_DENOMINATOR = 10**4
"""Largest denominator of a weight: prices have four decimals at most."""

EXACT_RATIO = 1e-12
"""Relative difference below which two weights are one."""


class CountsModel:
    """The lightest counts whose rate the cuts allow; a resource of one search."""

    def __init__(
        self, problem: InstancesProblem, columns: tuple[int, ...], *, most_weight: float | None
    ) -> None:
        self.problem, self.columns = problem, columns
        self.model = cp_model.CpModel()
        self.count_J = {
            j: self.model.new_int_var(0, problem.most_instances(j), f"n{j}") for j in columns
        }
        for number, pool in enumerate(problem.pools):
            taken_J = [column.devices_P[number] for column in problem.columns]
            self.model.add(self._whole(taken_J, unit=1.0) <= pool.devices)
        self._limit_kinds()
        unit = common_unit(tuple(problem.weight_J[j] for j in columns))
        weight = self._whole(problem.weight_J, unit=unit)
        self.model.minimize(weight)
        if most_weight is not None:
            self.model.add(weight <= math.floor(most_weight / unit))

    def _whole(self, slope_J: Sequence[float], *, unit: float) -> cp_model.LinearExpr:
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

    def add_cut(self, cut: Cut, *, least_per_s: float, unit_per_s: float) -> None:
        """Require that the cut allows the least rate, up to a rounding to whole units."""
        missing_per_s = max(0.0, least_per_s - cut.constant)
        # An instance that serves more than what is missing counts as much as what is missing.
        lost_J = self._whole([-min(slope, missing_per_s) for slope in cut.slope_J], unit=unit_per_s)
        self.model.add(lost_J <= -math.floor(missing_per_s / unit_per_s))

    def forbid_as_many(self, count_J: tuple[int, ...]) -> None:
        """Leave out these counts and all that hold at least as many of every column."""
        fewer = []
        for j, count in self.count_J.items():
            if count_J[j]:
                has_fewer = self.model.new_bool_var("")
                self.model.add(count < count_J[j]).only_enforce_if(has_fewer)
                fewer.append(has_fewer)
        self.model.add_bool_or(fewer)

    def run(self, *, time_limit_s: float, threads: int) -> tuple[Status, tuple[int, ...]]:
        """Search once; return the counts of all columns, none without a solution.

        Raises:
            BackendFailedError: CP-SAT refuses the model.
        """
        status, solver = run_cp_sat(
            self.model,
            time_limit_s=time_limit_s,
            threads=threads,
            linearization_level=2,  # relaxations of these models are nearly tight
        )
        if not status.has_solution:
            return status, ()
        counts = [0] * len(self.problem.columns)
        for j, count in self.count_J.items():
            counts[j] = int(solver.value(count))
        return status, tuple(counts)


def common_unit(weights: tuple[float, ...]) -> float:
    """Return the unit of which all weights are multiples, if plain decimals; else a fine step."""
    plain = [Fraction(weight).limit_denominator(LARGEST_DENOMINATOR) for weight in weights]
    if any(abs(float(p) - w) > EXACT_RATIO * w for p, w in zip(plain, weights, strict=True)):
        return max(weights) / WEIGHT_STEPS
    denominator = math.lcm(*(fraction.denominator for fraction in plain))
    steps = math.gcd(*(int(fraction * denominator) for fraction in plain))
    # A hair less, so that no multiple is rounded down to the one below it.
    return steps / denominator * (1.0 - EXACT_RATIO)
