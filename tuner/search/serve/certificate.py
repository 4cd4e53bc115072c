"""Certificate of the chosen instances, and the number of others that cost about as much."""

from collections import Counter
from collections.abc import Sequence
from typing import Final

from solvers.instances.problem import InstancePlan
from solvers.result import Outcome, Status
from tuner.plans.serve import ServeCertificate, ServeSpace
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.preference import objective_value
from tuner.search.serve.problem import ModeSolution, ModeSolutions, ServeProblem
from tuner.search.serve.program import BOUND_TOLERANCE, unrouted_pair
from tuner.search.serve.to_plan import tie_ratio

MOST_TIES: Final = 10
TIES_S: Final = 2.0
"""Seconds for finding ties."""


def to_certificate(
    best: ModeSolution, problem: ServeProblem, solutions: ModeSolutions, *, solve_s: float
) -> ServeCertificate:
    """State what is proven about the instances.

    The bound is the least of all modes that can be launched, at the goal's own spare capacity: what
    waiting costs besides is simulated, not proven, and shows as the gap. Modes that miss a target
    once simulated count too, since no search proves that they always do.

    Ties of the chosen mode are other counts whose objective lies within the band; those of the
    others are the modes whose objective does. They are not simulated.

    Args:
        best: chosen.
        problem: that was solved.
        solutions: of all modes.
        solve_s: taken in all.
    """
    outcome: Outcome[InstancePlan] = best.solved.outcome
    ties, is_least = _ties(best)
    limit = (1.0 + tie_ratio()) * objective_value(best, problem.spec.goal)
    modes = [
        solution
        for solution in solutions.fitting
        if solution is not best and objective_value(solution, problem.spec.goal) <= limit
    ]
    bound = min(best.bound, *(solution.bound for solution in solutions.launchable))
    is_proven = bound >= best.objective * (1.0 - BOUND_TOLERANCE)
    # A program of rates counts seconds per request.
    is_rate = best.rate_per_s is not None
    return ServeCertificate(
        status="optimal" if outcome.status is Status.OPTIMAL and is_proven else "feasible",
        objective=1.0 / best.objective if is_rate else best.objective,
        bound=1.0 / bound if is_rate else bound,
        gap_ratio=min(max(1.0 - bound / best.objective, 0.0), 1.0),
        covers=_covers(solutions.launchable),
        program_gap_ratio=outcome.gap_ratio,
        space=to_space(problem, solutions.serving),
        within_band=len(modes) + ties,
        within_band_is_least=is_least,
        solve_s=solve_s,
        method=outcome.method,
    )


def _covers(launched: Sequence[ModeSolution]) -> str:
    modes = ", ".join(solution.mode for solution in launched)
    kinds = min((solution.covered_kinds for solution in launched), default=1)
    kinds_text = "one kind" if kinds == 1 else f"up to {kinds} kinds"
    where = " and island" if any(solution.solved.program.islands for solution in launched) else ""
    return f"{modes}, {kinds_text} of instance a role{where}, as if no request waited"


def to_space(problem: ServeProblem, serving: Sequence[ModeSolution]) -> ServeSpace:
    """Count what was priced: instance options, and those that single modes add.

    Options of a mode that no release has are in no space.
    """
    made = [solution for solution in serving if load_mode(solution.mode).makes_options]
    added = sum(len(solution.solved.program.options) for solution in made)
    illegal = Counter(problem.options.illegal_by)
    for mode, priced in problem.own_options.items():
        added += len(priced.options)
        illegal.update(priced.illegal_by if mode in problem.launchable_modes else {})
    return ServeSpace(
        priced=len(problem.options.options) + added,
        bounded=problem.options.beaten
        + sum(priced.beaten for priced in problem.own_options.values()),
        illegal=illegal.total(),
        illegal_by=dict(illegal.most_common()),
    )


def _ties(best: ModeSolution) -> tuple[int, bool]:
    """Count other instances of the same mode that cost about as much, and whether there are more.

    Those with a pair without a route do not count.
    """
    from solvers.instances.alternatives import alternatives

    chosen, problem = best.solved.outcome.solution, best.solved.program.problem
    if chosen is None:
        return 0, False
    near = alternatives(
        problem, chosen, band_ratio=tie_ratio(), max_plans=MOST_TIES + 1, time_limit_s=TIES_S
    )
    others = [plan for plan in near.plans if plan.count_J != chosen.count_J]
    return sum(unrouted_pair(problem, plan) is None for plan in others), not near.is_complete
