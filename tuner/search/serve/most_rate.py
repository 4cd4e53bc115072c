"""Solves one mode where the goal is the highest request rate that the pools serve.

The objective is DistServe's (arXiv:2401.09670): goodput of given devices under SLO targets. For
every variant of a mode (solve_mode.py) the integer program with the rate as its objective chooses
instances, without queueing: its rate is the bound. The traffic is simulated with these instances,
and bisection finds the largest rate at which every target holds, to `RATE_STEP` of it and no nearer
than that to what the instances can serve, where queues have no end.

The program sees no queueing, so others are tried beside it: with more spare capacity of prefill,
and without instances whose own latency is close to a missed target. A candidate is dropped where
its capacity, or its simulation just above the best rate, shows that it serves no more.

Not covered: AFD (attention-FFN disaggregation), which no program chooses.
"""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from solvers.result import Status
from tuner.catalog.serve_rules.rules import is_disaggregated
from tuner.search.serve.islands import capacity_per_s
from tuner.search.serve.problem import ModeSolution, ServeProblem
from tuner.search.serve.program import OBJECTIVE, SolvedProgram, Spare
from tuner.search.serve.routers import RouterChoice
from tuner.search.serve.simulation import InstanceGroup, SimulationResult
from tuner.search.serve.solve_mode import (
    MOST_SIMULATED,
    at_traffic_share,
    goal_spare,
    instance_groups,
    planned_routers,
    simulate_traffic,
    solve_instances,
    solve_variants,
    solve_with_remaining_hits,
    solve_with_router,
    tighter_problems,
)
from tuner.spec.serving.goal import Mode

RATE_STEP: Final = 0.01
"""Precision of the rate that is found: a rate higher by this share misses a target."""
LEAST_RATIO: Final = 1.0 / 64.0
"""Lowest rate that is tried, as a share of what instances could serve: where the targets do not
hold here, they are missed."""
PREFILL_SPARES: Final = (0.25, 0.5, 1.0)
"""Spare ratios of prefill instances that are tried, where they exceed the goal's own."""


def solve_goal(
    problem: ServeProblem, mode: Mode, *, before: ModeSolution | None = None
) -> ModeSolution | None:
    """Solve a mode by the goal's objective; None where nothing serves or beats `before`.

    Args:
        problem: of the mode.
        mode: to solve.
        before: what the solution has to beat; None: nothing.
    """

    def behind_routers(variant: ServeProblem) -> ModeSolution | None:
        solution = before
        is_rate = variant.spec.goal.objective == "rate"
        solve = _most_rate_with if is_rate else solve_with_router
        for router in variant.routers or planned_routers(variant.spec, mode):
            solution = solve(variant, mode, router, solution)
        is_before = solution and before and solution.groups is before.groups
        return None if is_before else solution

    return solve_with_remaining_hits(problem, mode, behind_routers)


def _most_rate_with(
    problem: ServeProblem,
    mode: Mode,
    router: RouterChoice,
    before: ModeSolution | None,
) -> ModeSolution | None:
    """Find the instances with the highest rate behind one router."""
    least = goal_spare(problem)
    first = solve_variants(problem, mode, least, router=router)
    if not first:
        return before
    best = before
    for variant, solved in first[:MOST_SIMULATED]:
        fastest = _fastest_rate(variant, solved, least, router, above_per_s=_rate(best))
        if fastest is None:
            continue
        best = _faster(best, fastest)
        for candidate, spare in _other_programs(variant, fastest, mode):
            resolved = solve_instances(candidate, mode, spare, router=router)
            if resolved is not None:
                best = _faster(
                    best, _fastest_rate(candidate, resolved, spare, router, above_per_s=_rate(best))
                )
    if best is None:
        return None
    bounds = [solved.outcome.bound for _, solved in first]
    bounds += [] if before is None else [before.bound]
    return replace(best, bound=min(bounds), covered_kinds=router.most_kinds)


def at_rate(problem: ServeProblem, rate_per_s: float) -> ServeProblem:
    """Return the problem with that rate; of a closed loop or stated requests, with fewer."""
    goal = problem.spec.goal
    if goal.traffic.sets_its_rate:
        return at_traffic_share(problem, rate_per_s / problem.demand.rate_per_s)
    traffic = goal.traffic.model_copy(update={"rate": rate_per_s})
    spec = replace(problem.spec, goal=goal.model_copy(update={"traffic": traffic}))
    return replace(problem, spec=spec, demand=replace(problem.demand, rate_per_s=rate_per_s))


def _other_programs(
    problem: ServeProblem, base: ModeSolution, mode: Mode
) -> Iterator[tuple[ServeProblem, Spare]]:
    """Yield other problems and spare capacities, without the first one."""
    if not base.missed_at_goal_spare:
        return  # It serves what its program says, and no other serves more.
    least = goal_spare(problem)
    spares = [least]
    if is_disaggregated(mode):
        spares += [
            replace(least, prefill_ratio=ratio)
            for ratio in PREFILL_SPARES
            if ratio > least.prefill_ratio
        ]
    for candidate in (problem, *tighter_problems(problem, base.missed_at_goal_spare)):
        yield from (
            (candidate, spare) for spare in spares if (candidate, spare) != (problem, least)
        )


def _faster(best: ModeSolution | None, candidate: ModeSolution | None) -> ModeSolution | None:
    if best is None or (candidate is not None and _rate(candidate) > _rate(best)):
        return candidate
    return best


def _rate(solution: ModeSolution | None) -> float:
    return 0.0 if solution is None or solution.rate_per_s is None else solution.rate_per_s


def _fastest_rate(
    problem: ServeProblem,
    solved: SolvedProgram,
    spare: Spare,
    router: RouterChoice,
    *,
    above_per_s: float,
) -> ModeSolution | None:
    """Simulate instances at rates up to what they could serve; None where that is no more.

    A solution that misses a target at every rate is returned, without a rate, if it is the first.
    """
    mode, groups = solved.program.mode, instance_groups(solved)
    most_per_s = _capacity(problem, solved, groups)
    low = above_per_s * (1.0 + RATE_STEP) or LEAST_RATIO * most_per_s
    if low > most_per_s:
        return None
    known: dict[float, SimulationResult] = {}
    missed: dict[float, tuple[str, ...]] = {}
    for rate in _bisected(low, most_per_s, known):
        simulated = simulate_traffic(at_rate(problem, rate), mode, groups, router=router)
        late = simulated.missed(problem.spec.goal.slo)
        if late:
            missed[rate] = late
        else:
            known[rate] = simulated
    rate = max(known, default=low)
    if rate not in known and above_per_s:
        return None
    return ModeSolution(
        solved=solved,
        groups=groups,
        simulated=known.get(rate)
        or simulate_traffic(at_rate(problem, rate), mode, groups, router=router),
        spare=spare,
        missed=missed.get(rate, ()),
        threshold=problem.threshold,
        router=router,
        missed_at_goal_spare=missed[min(missed)] if missed else (),
        rate_per_s=rate if rate in known else None,
    )


def _bisected(low: float, high: float, known: Mapping[float, SimulationResult]) -> Iterator[float]:
    """Yield both ends, then middles; whoever simulates them notes those that hold."""
    yield low
    if low not in known or high == low:
        return
    yield high
    while high not in known and high - low > RATE_STEP * low:
        middle = 0.5 * (low + high)
        yield middle
        low, high = (middle, high) if middle in known else (low, middle)


def _capacity(
    problem: ServeProblem, solved: SolvedProgram, groups: tuple[InstanceGroup, ...]
) -> float:
    """Requests a second up to which instances are tried: a step less than all they could serve."""
    plan = solved.outcome.solution
    assert plan is not None  # as the program was solved
    most_per_s = capacity_per_s(groups)
    if solved.program.problem.links:
        most_per_s = min(most_per_s, plan.rate_per_s)
    return most_per_s / (1.0 + RATE_STEP) / (1.0 + problem.spec.goal.spare_ratio)


def at_stated_rate(
    solution: ModeSolution, problem: ServeProblem, *, stated: ModeSolution
) -> ModeSolution | None:
    """Return a solution of the highest rate as one of the problem's own; None where it misses it.

    The search for the fewest devices raises spare capacity in steps, and may pass over instances
    that hold a rate close to the most that the pools serve. `stated` is what it found. Instances
    of repriced prefix hits and of length thresholds belong to other problems.
    """
    plan, demand, mode = solution.solved.outcome.solution, problem.demand, solution.mode
    is_other = solution.threshold is not None or solution.prefix_hit is not None
    least_per_s = demand.rate_per_s * (1.0 + problem.spec.goal.spare_ratio)
    if is_other or plan is None or plan.rate_per_s < least_per_s:
        return None
    simulated = simulate_traffic(problem, mode, solution.groups, router=solution.router)
    if simulated.missed(problem.spec.goal.slo):
        return None
    program = replace(
        solution.solved.program.problem,
        objective=OBJECTIVE[problem.spec.goal.objective],
        demand_per_s=demand.rate_per_s,
        spare_ratio=0.0,
    )
    outcome = replace(
        solution.solved.outcome,
        status=Status.FEASIBLE,
        objective=sum(map(operator.mul, program.weight_J, plan.count_J)),
        bound=stated.solved.outcome.bound,
    )
    spare_ratio = plan.rate_per_s / demand.rate_per_s - 1.0
    return replace(
        solution,
        solved=SolvedProgram(
            program=replace(solution.solved.program, problem=program), outcome=outcome
        ),
        simulated=simulated,
        spare=replace(solution.spare, others_ratio=spare_ratio),
        missed=(),
        missed_at_goal_spare=stated.missed_at_goal_spare or stated.missed,
        bound=stated.bound,
        rate_per_s=None,
    )
