"""Every requested mode, solved and compared: one table, one reason a line.

Solutions that meet the targets and can be launched are ranked; those that would serve but no
release launches are named with what they would save; the rest state why they are infeasible.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

from tuner.catalog.serve_capabilities import modes_on, release_on
from tuner.catalog.serve_rules.rules import ROLES, absent_mode
from tuner.plans.serve import ServeModeResult
from tuner.search.serve.causes import binding_resource
from tuner.search.serve.most_rate import solve_goal
from tuner.search.serve.preference import (
    gain_ratio,
    held_back_reason,
    lost_by,
    objective_value,
    rank_solutions,
)
from tuner.search.serve.remote_prefill import length_thresholds
from tuner.search.serve.solve_mode import ModeSolution, ServeProblem
from tuner.search.serve.to_plan import describe_missed, describe_solution, solution_refusals
from tuner.spec.serving.goal import Mode


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModeSolutions:
    """The solutions of all modes."""

    serving: tuple[ModeSolution, ...]
    """Modes that serve the traffic, whether they meet the targets or not."""
    refused: Mapping[Mode, tuple[str, ...]]
    """Refusals of the engine's release, by mode."""
    fitting: tuple[ModeSolution, ...]
    """Solutions that meet the targets and can be launched, best first."""

    @property
    def best(self) -> ModeSolution | None:
        """Return the best solution that meets the targets and can be launched."""
        return self.fitting[0] if self.fitting else None

    @property
    def launched(self) -> tuple[ModeSolution, ...]:
        """Return the solutions that can be launched, whether they meet the targets or not."""
        return tuple(solution for solution in self.serving if not self.refused[solution.mode])

    def of(self, mode: Mode) -> ModeSolution | None:
        """Return a mode's solution."""
        return next((solution for solution in self.serving if solution.mode == mode), None)


def requested_modes(problem: ServeProblem) -> tuple[Mode, ...]:
    """Return the requested modes, in the order of their list."""
    return tuple(mode for mode in get_args(Mode) if mode in problem.spec.goal.modes)


def solve_modes(problem: ServeProblem) -> ModeSolutions:
    """Solve every mode."""
    serving = tuple(
        solved for mode in requested_modes(problem) if (solved := solve_goal(problem, mode))
    )
    refused = {solution.mode: solution_refusals(solution, problem) for solution in serving}
    fitting = rank_solutions(
        [solution for solution in serving if not solution.missed and not refused[solution.mode]],
        problem,
    )
    return ModeSolutions(serving=serving, refused=refused, fitting=fitting)


def mode_table(solutions: ModeSolutions, problem: ServeProblem) -> tuple[ServeModeResult, ...]:
    """Return a line for every mode."""
    return tuple(_mode_row(mode, solutions, problem) for mode in requested_modes(problem))


def _mode_row(mode: Mode, solutions: ModeSolutions, problem: ServeProblem) -> ServeModeResult:
    mode_solution, best = solutions.of(mode), solutions.best
    if mode_solution is None:
        return ServeModeResult(mode=mode, status="none", told=explain_no_solution(mode, problem))
    refusals = solutions.refused[mode]
    status, reason = (
        "alternative",
        "" if best is None else lost_by(mode_solution, best, problem.spec.goal),
    )
    if mode_solution.missed:
        status, reason = "missed", describe_missed(mode_solution, problem)
    elif refusals:
        status, reason = "unlaunchable", f"{describe_solution(mode_solution)}; {refusals[0]}"
    elif mode_solution is best:
        status, reason = "chosen", ""
    elif best is not None:
        reason += held_back_reason(mode_solution, best, problem.spec.goal)
    gained = (
        None
        if best is None
        else gain_ratio(_worth(mode_solution, problem), best, problem.spec.goal)
    )
    return ServeModeResult.model_validate(
        {
            "mode": mode,
            "status": status,
            "devices": mode_solution.devices,
            "requests_per_s": mode_solution.rate_per_s,
            "cost_per_hour": mode_solution.price_per_hour,
            "ttft_s": float(mode_solution.simulated.ttft_s_R.mean()),
            "tpot_s": float(mode_solution.simulated.tpot_s_R.mean())
            if len(mode_solution.simulated.tpot_s_R)
            else None,
            "gain_ratio": gained,
            "told": reason,
        }
    )


def explain_no_solution(mode: Mode, problem: ServeProblem) -> str:
    """Say why a mode serves nothing."""
    if mode == "prefill_offload" and (line := _no_offload(problem)):
        return line
    if mode == "attention_expert" and (line := _no_afd_units(problem)):
        return line
    if problem.options.slowest_tpot_s == float("inf"):
        return "memory: no parallel layout of the model leaves room for one request"
    goal, pools = problem.spec.goal, problem.spec.cluster.pools
    # AFD units that a release without the mode refuses are solved, too.
    if mode != "attention_expert" and mode not in modes_on(goal, problem.spec.cluster):
        return absent_mode(release_on(goal, pools[0]), mode)
    for role, line in problem.refused.items():
        if role in ROLES[mode]:
            return line
    return binding_resource(problem, mode)


def _no_offload(problem: ServeProblem) -> str:
    """Say why no prompts can be prefilled elsewhere; empty: they can."""
    if len(problem.serving_pools) < 2:
        return "there is no second pool to prefill long prompts"
    if not problem.spec.cluster.links:
        return "no link joins the pools, so that no cache gets from one to another"
    if not length_thresholds(problem.spec.goal, problem.demand):
        return "all prompts are equally long, so that no length separates them"
    return ""


def _no_afd_units(problem: ServeProblem) -> str:
    """Say why no AFD unit serves, whether a release launches it or not; empty: some do."""
    units = problem.afd_units
    if problem.decoder.experts is None:
        return "the model has no experts"
    if units.options or units.refused_units:
        return ""
    return next(iter(units.illegal_by), "no pool has devices for both sides of an AFD unit")


def _worth(mode_solution: ModeSolution, problem: ServeProblem) -> float:
    return objective_value(mode_solution, problem.spec.goal)
