"""What refused KV transfers and AFD units would gain: solved as if the release allowed them.

Pairs of two vendors are solved each way round, prefill on the one and decode on the other, so that
every rule between vendors is listed with what it costs, or with what the pair would lose.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Final

from tuner.config.serve import Role
from tuner.config.serve_words import target_words
from tuner.plans.serve import ServeUnlaunchable
from tuner.search.serve.kv_transfers import kept_by
from tuner.search.serve.most_rate import solve_goal
from tuner.search.serve.options import ServingPool
from tuner.search.serve.preference import gain_ratio, lost_by, objective_value
from tuner.search.serve.solve_mode import ModeSolution, ServeProblem, restrict_problem
from tuner.search.serve.to_plan import describe_solution, solution_refusals
from tuner.units import format_counted, format_ratio

LEAST_GAIN_RATIO: Final = 1e-6
"""Less is the solver's tolerance."""
SAVED: Final = {"cost": "money", "rate": "time a request"}
"""What there is less of, by objective; else devices."""


def refused_kv_transfers(problem: ServeProblem, best: ModeSolution) -> Iterator[ServeUnlaunchable]:
    """Name a refused pair of prefill and decode instances whose plan would beat the best one."""
    if "disaggregated" not in problem.spec.goal.modes or not _refuses(problem):
        return
    free = solve_goal(problem, "disaggregated", may_refuse=False)
    if free is None or free.missed:
        return
    broken = _broken(problem, free)
    if broken and ": rule " in broken[0]:
        return  # Between vendors: refused_vendors names it.
    goal = problem.spec.goal
    gained = gain_ratio(objective_value(free, goal), best, goal)
    if broken and gained > LEAST_GAIN_RATIO:
        less = SAVED.get(goal.objective, "devices")
        yield ServeUnlaunchable(
            feature=(
                f"disaggregated on {free.devices} devices, {format_ratio(gained, digits=0)} less"
                f" {less}: {broken[0]}"
            ),
            gain_ratio=gained,
        )


def refused_afd_units(
    problem: ServeProblem, best: ModeSolution, own: ModeSolution | None
) -> Iterator[ServeUnlaunchable]:
    """Name a refused AFD unit that would take fewer devices than those launched.

    Args:
        problem: with its AFD units.
        best: what was chosen.
        own: the mode's solution with units that the release launches.
    """
    afd_units, goal = problem.afd_units, problem.spec.goal
    if own is None or not afd_units.options or not afd_units.refused:
        return
    free = solve_goal(restrict_problem(problem, _with_refused_cells), "attention_expert")
    if free is None or free.missed:
        return
    broken = solution_refusals(free, problem)
    if broken and gain_ratio(objective_value(free, goal), own, goal) > LEAST_GAIN_RATIO:
        yield ServeUnlaunchable(
            feature=(
                f"{describe_solution(free)}: {format_counted(free.devices, 'device')}, launched"
                f" AFD units take {own.devices}; {broken[0]}"
            ),
            gain_ratio=max(gain_ratio(objective_value(free, goal), best, goal), 0.0),
        )


def refused_vendors(
    problem: ServeProblem, best: ModeSolution | None
) -> Iterator[ServeUnlaunchable]:
    """Name every pair of pools of two vendors that no connector joins, with its gain or loss.

    Args:
        problem: that was solved.
        best: the chosen solution; None where nothing meets the targets.
    """
    if "disaggregated" not in problem.spec.goal.modes:
        return
    goal = problem.spec.goal
    for sender, receiver in product(problem.serving_pools, problem.serving_pools):
        vendors = [one.machine.sheet.generation.vendor for one in (sender, receiver)]
        if vendors[0] is vendors[1] or not problem.kv_transfers.reach(sender, receiver):
            continue
        between_vendors = restrict_problem(
            problem, partial(_between, sender=sender, receiver=receiver)
        )
        rules = _rules(between_vendors)
        if not rules:
            continue
        solution = solve_goal(between_vendors, "disaggregated", may_refuse=False)
        where = f"prefill on {sender.pool.name} and decode on {receiver.pool.name}"
        if solution is None or solution.missed:
            missed = (
                "serve the traffic"
                if solution is None
                else f"hold {target_words(solution.missed[0])}"
            )
            yield ServeUnlaunchable(
                feature=f"{where}: would not {missed} either; {rules[0]}",
                gain_ratio=0.0,
                rule=_rule(rules[0]),
            )
            continue
        takes = f"would serve the traffic on {format_counted(solution.devices, 'device')}"
        if best is not None:
            takes = lost_by(solution, best, goal)
        elif solution.price_per_hour:
            takes += f" for {solution.price_per_hour:.4g} an hour"
        gained = 0.0 if best is None else gain_ratio(objective_value(solution, goal), best, goal)
        yield ServeUnlaunchable(
            feature=f"{where}: {takes}; {rules[0]}",
            gain_ratio=max(gained, 0.0),
            rule=_rule(rules[0]),
        )


def _with_refused_cells(problem: ServeProblem) -> ServeProblem:
    """Return the problem with refused AFD units among those that are launched."""
    afd_units = problem.afd_units
    every = replace(afd_units, options=(*afd_units.options, *afd_units.refused), refused=())
    return replace(problem, afd_units=every)


def _rule(line: str) -> str:
    """Return the name of the rule that a refusal states; that of layouts where it names none."""
    _, solution, after = line.partition("rule ")
    return after.partition(":")[0] if solution else "layout"


def _between(problem: ServeProblem, sender: ServingPool, receiver: ServingPool) -> ServeProblem:
    """Return the problem with prefill on one pool and decode on another."""
    kept = tuple(
        option
        for option in problem.options.options
        if (option.role is Role.PREFILL and option.serving_pool.pool.name == sender.pool.name)
        or (option.role is Role.DECODE and option.serving_pool.pool.name == receiver.pool.name)
    )
    return replace(problem, options=replace(problem.options, options=kept))


def _rules(problem: ServeProblem) -> tuple[str, ...]:
    """Return why every pair of options is refused; empty: one is not, or there is none."""
    lines = [
        problem.kv_transfers.refusals(one, other)
        for one, other in product(problem.options.options, problem.options.options)
        if one.role is Role.PREFILL and other.role is Role.DECODE
    ]
    return lines[0] if lines and all(lines) else ()


def _refuses(problem: ServeProblem) -> bool:
    """Whether any two options that can reach each other are refused."""
    kinds = {
        (option.role, option.serving_pool.pool.name, kept_by(option)): option
        for option in problem.options.options
    }.values()
    return any(
        problem.kv_transfers.reach(one.serving_pool, other.serving_pool)
        and problem.kv_transfers.refusals(one, other)
        for one, other in product(kinds, kinds)
        if one.role is Role.PREFILL and other.role is Role.DECODE
    )


def _broken(problem: ServeProblem, free: ModeSolution) -> tuple[str, ...]:
    return tuple(
        f"{one.option.serving_pool.pool.name} to {other.option.serving_pool.pool.name}: {line}"
        for one, other in product(free.groups, free.groups)
        if one.option.role is Role.PREFILL and other.option.role is Role.DECODE
        for line in problem.kv_transfers.refusals(one.option, other.option)
    )
