"""The cheapest deployment that misses a target by less than its own error band.

The search simulates deployments that cost less than the chosen one and miss a target once requests
wait; one whose miss is smaller than what the prediction is known to be off by may hold the target
in fact. Instances are priced at batches within the TPOT target, so each launched mode's program is
solved once more with the batches that take `LONGER_RATIO` of it, already priced.

Not covered: prompts alone that miss the TTFT target; the goal `objective: rate`; modes repriced
with the prefix hits of fewer sessions.
"""

from dataclasses import replace
from typing import Final

import numpy as np

from tuner.config.serve import Role
from tuner.costs.serve.bands import PUBLISHED
from tuner.plans.serve import MissedTarget, ServeNearMiss
from tuner.search.serve.options import drop_dominated
from tuner.search.serve.preference import bands_around, lost_by, objective_value
from tuner.search.serve.problem import ModeSolution, ModeSolutions, ServeProblem
from tuner.search.serve.program import BOUND_TOLERANCE
from tuner.search.serve.simulation import SimulationResult
from tuner.search.serve.solve_mode import (
    goal_spare,
    planned_routers,
    simulate_traffic,
    solve_and_simulate,
)
from tuner.search.serve.to_plan import solution_refusals, to_decision

LONGER_RATIO: Final = 1.1
"""TPOT over its target up to which batches are tried: more than the narrowest band of a latency."""
MOST_SETTLED: Final = 2
"""Deployments that are simulated until their queues settle, the cheapest first."""


def near_miss(problem: ServeProblem, solutions: ModeSolutions) -> ServeNearMiss | None:
    """Return the cheapest near miss that takes less than the chosen solution; None without one."""
    goal = problem.spec.goal
    is_repriced = any(solution.prefix_hit is not None for solution in solutions.serving)
    if goal.objective == "rate" or is_repriced or not goal.slo.is_stated:
        return None
    best = solutions.fitting[0] if solutions.fitting else None
    limit = float("inf") if best is None else objective_value(best, goal)
    _simulate_larger_batches(problem, solutions, best)
    cheaper = sorted(
        (
            solution
            for solution in problem.simulated
            if solution.mode in problem.launchable_modes
            and objective_value(solution, goal) < limit * (1.0 - BOUND_TOLERANCE)
            and _misses(solution, solution.simulated, problem)
            and not solution_refusals(solution, problem)
        ),
        key=lambda solution: objective_value(solution, goal),
    )
    for candidate in cheaper[:MOST_SETTLED]:
        missed = _misses(candidate, _settled(candidate, problem), problem)
        if missed:
            return ServeNearMiss(
                decision=to_decision(candidate, problem),
                cost_per_hour=candidate.price_per_hour,
                missed=missed,
                comparison="" if best is None else lost_by(candidate, best, goal),
            )
    return None


def _simulate_larger_batches(
    problem: ServeProblem, solutions: ModeSolutions, best: ModeSolution | None
) -> None:
    """Simulate solutions of each launched mode whose steps take a little longer than the target."""
    limit_s = LONGER_RATIO * problem.demand.tpot_s
    if limit_s == float("inf"):
        return
    prefills = [option for option in problem.options.options if option.role is Role.PREFILL]
    larger = [
        replace(
            curve.option,
            running=int(curve.running_N[at]),
            tpot_s=float(curve.tpot_s_N[at]),
            rate_per_s=float(curve.rate_N[at]),
        )
        for curve in problem.options.curves
        for at in np.flatnonzero(curve.tpot_s_N <= limit_s)[-1:]
    ]
    options = replace(problem.options, options=tuple(drop_dominated([*prefills, *larger])))
    relaxed = replace(problem, options=options)
    for mode in problem.launchable_modes:
        if mode not in PUBLISHED:
            continue
        solution = solutions.of(mode)
        spare = goal_spare(problem) if solution is None else solution.spare
        routers = planned_routers(problem.spec, mode)
        router = routers[0] if solution is None else solution.router
        solve_and_simulate(relaxed, mode, spare, router, best)


def _settled(solution: ModeSolution, problem: ServeProblem) -> SimulationResult:
    """Simulate until queues settle, as the search ends where few requests miss a target."""
    problem = replace(problem, threshold=solution.threshold)
    mode, router = solution.mode, solution.router
    return simulate_traffic(problem, mode, solution.groups, router=router, may_stop=False)


def _misses(
    solution: ModeSolution, simulated: SimulationResult, problem: ServeProblem
) -> tuple[MissedTarget, ...]:
    """Return the targets that are missed; none where one is missed by more than its band."""
    bands = bands_around(solution, problem)
    low = {"ttft": bands.ttft.around(1.0)[0], "tpot": bands.tpot.around(1.0)[0]}
    missed = simulated.misses(problem.spec.goal.slo)
    if any(low[name.split()[0]] * seconds > limit_s for name, seconds, limit_s in missed):
        return ()
    return tuple(
        MissedTarget(target=name, seconds=seconds, limit_s=limit_s)
        for name, seconds, limit_s in missed
    )
