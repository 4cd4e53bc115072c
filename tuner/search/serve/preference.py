"""Preference among solutions: by the goal, and by whether published runs back their mode.

Bands of aggregated and disaggregated launches are made from published runs, those of other modes
are wider (tuner/costs/serve/bands.py). A mode without runs is chosen over one
with them only where it takes less at the far end of its band too:

    far end     steps h times as long, so a capacity of 1 / h: its program is solved once more with
                (1 + spare) h - 1 in place of the spare capacity that the simulation needed
    a tie       goes to the mode with runs

Not covered: latencies at the far end of a band, which modes with runs are not held to either.
"""

import math
from collections.abc import Sequence

from tuner.costs.serve.bands import PUBLISHED, Bands, joined
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.problem import ModeSolution, ServeProblem
from tuner.search.serve.program import BOUND_TOLERANCE, Spare
from tuner.search.serve.solve_mode import solve_instances
from tuner.spec.serving.goal import ServeGoal
from tuner.units import format_counted


def rank_solutions(
    solution: Sequence[ModeSolution], problem: ServeProblem
) -> tuple[ModeSolution, ...]:
    """Order solutions, best first; those held back by the rule above come last."""
    order = sorted(solution, key=lambda candidate: rank_key(candidate, problem.spec.goal))
    first = next((at for at, candidate in enumerate(order) if candidate.mode in PUBLISHED), 0)
    least = objective_value(order[first], problem.spec.goal) if order else 0.0
    held_back = [
        candidate
        for candidate in order[:first]
        if worst_objective(candidate, problem) >= least * (1.0 - BOUND_TOLERANCE)
    ]
    return (*(candidate for candidate in order if candidate not in held_back), *held_back)


def worst_objective(solution: ModeSolution, problem: ServeProblem) -> float:
    """Return the objective at the far end of the band; infinite beyond the pools."""
    longer = max(bands_around(solution, problem).tpot.high_ratio, 1.0)
    if solution.rate_per_s is not None:
        return longer / solution.rate_per_s
    spare = Spare(
        prefill_ratio=(1.0 + solution.spare.prefill_ratio) * longer - 1.0,
        others_ratio=(1.0 + solution.spare.others_ratio) * longer - 1.0,
    )
    return min(
        (
            solved.outcome.objective
            for variant in load_mode(solution.mode).variants(problem)
            if (solved := solve_instances(variant, solution.mode, spare, router=solution.router))
            is not None
        ),
        default=math.inf,
    )


def bands_around(solution: ModeSolution, problem: ServeProblem) -> Bands:
    """Return the bands of TTFT and TPOT; of several engines, bands that hold for each."""
    goal = problem.spec.goal
    decoder = solution.groups[0].option.iteration.decoder
    pools = [group.option.serving_pool for group in solution.groups]
    return joined(
        [
            serving_pool.bands(
                goal.engine_on(serving_pool.pool.name).name,
                release=problem.spec.releases[serving_pool.pool.name].release,
                mode=solution.mode,
                decoder=decoder,
            )
            for serving_pool in pools
        ]
    )


def rank_key(solution: ModeSolution, goal: ServeGoal) -> tuple[float, float]:
    """Sort key by the goal's objective; the least is best."""
    price = solution.price_per_hour or 0.0
    if goal.objective == "rate":
        return objective_value(solution, goal), float(solution.devices)
    if goal.objective == "cost":
        return price, float(solution.devices)
    if goal.objective == "devices":
        return float(solution.devices), price
    goodput = solution.simulated.requests_per_s * solution.simulated.met_ratio
    return -goodput / solution.devices, price


def objective_value(solution: ModeSolution, goal: ServeGoal) -> float:
    """Return what the goal minimises: money an hour, devices, or seconds a request."""
    if goal.objective == "rate":
        return math.inf if solution.rate_per_s is None else 1.0 / solution.rate_per_s
    return (solution.price_per_hour or 0.0) if goal.objective == "cost" else float(solution.devices)


def gain_ratio(worth: float, best: ModeSolution, goal: ServeGoal) -> float:
    """Return the share saved against the chosen solution; negative where it takes more."""
    return 1.0 - worth / max(objective_value(best, goal), 1e-9)


def lost_by(solution: ModeSolution, best: ModeSolution, goal: ServeGoal) -> str:
    """Say how a solution compares with the chosen one."""
    if goal.objective == "rate":
        rates = [
            0.0 if candidate.rate_per_s is None else candidate.rate_per_s
            for candidate in (solution, best)
        ]
        return f"{rates[0]:.4g} requests/s, the chosen one serves {rates[1]:.4g}"
    text = f"{format_counted(solution.devices, 'device')}, the chosen one takes {best.devices}"
    if solution.devices == best.devices:
        text = "as many devices as the chosen one"
    if goal.objective == "cost":
        prices = (solution.price_per_hour or 0.0, best.price_per_hour or 0.0)
        text += f"; {prices[0]:.4g} an hour against {prices[1]:.4g}"
    elif goal.objective == "goodput":
        goodputs = [-rank_key(candidate, goal)[0] for candidate in (solution, best)]
        text += f"; {goodputs[0]:.4g} good requests/s a device against {goodputs[1]:.4g}"
    return text


def held_back_reason(solution: ModeSolution, best: ModeSolution, goal: ServeGoal) -> str:
    """Say why a launchable solution that takes less is not chosen; else nothing."""
    if solution.mode in PUBLISHED or rank_key(solution, goal) > rank_key(best, goal):
        return ""
    return (
        f"; no published run backs {solution.mode}, and where steps are as long as its band"
        " allows it takes no less: measure it before relying on it"
    )
