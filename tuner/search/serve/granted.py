"""What engines, their routers and connectors lack, and what it would save.

A mode that is refused is solved already. Every other lack is the least change of the problem that
lifts it (`Grant`), and the problem is solved again with it by the search that plans:

    a KV transfer           between instances that the connector refuses
    an AFD unit             of sizes that the plugin refuses
    a router with weights   routers of prefill and decode instances, and Dynamo's frontend, have
                            none: unequal instances get as many outstanding requests each
    two vendors             each way round, prefill on the one and decode on the other, whatever it
                            takes: every rule between vendors is listed
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from tuner.config.serve import Role
from tuner.config.serve_words import target_words
from tuner.engines.serve_rules.routers import router_with
from tuner.plans.serve import PUBLISHED_MODES, ServeUnlaunchable
from tuner.search.serve.kv_transfers import kept_by
from tuner.search.serve.modes import ModeSolutions
from tuner.search.serve.most_rate import solve_goal
from tuner.search.serve.options import ServingPool
from tuner.search.serve.preference import gain_ratio, lost_by, objective_value
from tuner.search.serve.routers import (
    MOST_KINDS,
    ROUTED,
    RouterChoice,
    has_sessions,
    stack_routers,
)
from tuner.search.serve.solve_mode import ModeSolution, ServeProblem, restrict_problem
from tuner.search.serve.to_plan import describe_solution, solution_refusals
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.routers import RouterPolicy
from tuner.units import format_counted

LEAST_GAIN_RATIO: Final = 1e-6
"""Less is the solver's tolerance."""
WEIGHTED: Final = RouterPolicy.WEIGHTED_LEAST_REQUESTS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grant:
    """The least change that lets a mode use what is lacking."""

    mode: Mode
    change: Callable[[ServeProblem], ServeProblem]
    than: ModeSolution | None = None
    """Named where it beats this; None: whatever it takes."""
    lacking: str = ""
    """Who lacks what; empty: what the release refuses of the solution."""
    where: str = ""
    """What is granted, of a grant that is named whatever it takes."""
    words: str = ""
    """Said of the solution."""


def unlaunchable(problem: ServeProblem, solutions: ModeSolutions) -> Iterator[ServeUnlaunchable]:
    """Name everything that is not launchable, with what it would save against the chosen plan."""
    best = solutions.best
    for one in solutions.serving:
        if (lines := solutions.refused[one.mode]) and not one.missed:
            guess = "" if one.mode in PUBLISHED_MODES else "; no published run backs this mode"
            yield _named(problem, one, best, what=describe_solution(one), why=lines[0] + guess)
    grants = [] if best is None else [*_rules(problem, solutions, best), *_routers(problem, best)]
    for grant in (*grants, *_vendors(problem)):
        yield from _granted(problem, grant, best)


def _granted(
    problem: ServeProblem, grant: Grant, best: ModeSolution | None
) -> Iterator[ServeUnlaunchable]:
    """Solve the problem with a grant; nothing where that saves nothing that was to be named."""
    changed = restrict_problem(problem, grant.change)
    solution = solve_goal(changed, grant.mode, before=grant.than)
    if grant.than is None:
        own = _named(problem, solution, best, what=grant.where, why=grant.lacking)
        yield own.model_copy(update={"rule": _rule(grant.lacking) or "layout"})
        return
    if solution is None or solution.missed:
        return
    refused = solution_refusals(solution, problem)
    goal, why = problem.spec.goal, next(iter(refused), "")
    # A rule between vendors is named by its own grant.
    if bool(why) == bool(grant.lacking) or _rule(why):
        return
    if gain_ratio(objective_value(solution, goal), grant.than, goal) > LEAST_GAIN_RATIO:
        what = describe_solution(solution) + grant.words
        yield _named(problem, solution, best, what=what, why=grant.lacking or why)


def _named(
    problem: ServeProblem,
    solution: ModeSolution | None,
    best: ModeSolution | None,
    *,
    what: str,
    why: str,
) -> ServeUnlaunchable:
    """Name one that is not launchable, with what it takes beside the chosen solution."""
    goal, gained = problem.spec.goal, 0.0
    if solution is None or solution.missed:
        late = () if solution is None else solution.missed
        missed = f"hold {target_words(late[0])}" if late else "serve the traffic"
        takes = f"would not {missed} either"
    elif best is not None:
        takes = lost_by(solution, best, goal)
        gained = max(gain_ratio(objective_value(solution, goal), best, goal), 0.0)
    else:
        takes = f"would serve the traffic on {format_counted(solution.devices, 'device')}"
        if solution.price_per_hour:
            takes += f" for {solution.price_per_hour:.4g} an hour"
    return ServeUnlaunchable(feature=f"{what}: {takes}; {why}", gain_ratio=gained)


def _rule(line: str) -> str:
    """Return the name of the rule between vendors that a refusal states; empty: it is no such."""
    return line.partition(": rule ")[2].partition(":")[0]


def _rules(problem: ServeProblem, solutions: ModeSolutions, best: ModeSolution) -> Iterator[Grant]:
    """Yield what the release refuses of KV transfers and AFD units."""
    pairs = _pairs(problem)
    if "disaggregated" in problem.spec.goal.modes and any(pairs):
        yield Grant(mode="disaggregated", change=_every_transfer, than=best)
    own = solutions.of("attention_expert")
    if own is not None and problem.afd_units.options and problem.afd_units.refused:
        words = f", where launched AFD units take {own.devices}"
        yield Grant(mode="attention_expert", change=_every_unit, than=own, words=words)


def _routers(problem: ServeProblem, best: ModeSolution) -> Iterator[Grant]:
    """Yield modes whose routers know no weights; for sessions they would look for prefixes too."""
    spec = problem.spec
    goal = spec.goal
    stacks = stack_routers(goal, spec.emit, spec.cluster.pools)
    for mode in () if has_sessions(goal) else sorted(ROUTED & set(goal.modes)):
        is_disaggregated = mode == "disaggregated"
        lacking = next(
            (
                f"{stack[0].name} {stack[0].release} has no {WEIGHTED.value}"
                for stack in stacks
                if router_with(stack, WEIGHTED, is_disaggregated=is_disaggregated) is None
            ),
            "",
        )
        router = RouterChoice(
            policy=RouterPolicy.LEAST_REQUESTS,
            mixed_policy=WEIGHTED,
            decode_policy=WEIGHTED if is_disaggregated else None,
            most_kinds=MOST_KINDS,
        )
        if lacking:
            yield Grant(
                mode=mode,
                change=lambda one, router=router: replace(one, routers=(router,)),  # type: ignore[misc]  # bound early
                than=best,
                lacking=lacking + " of prefill and decode instances" * is_disaggregated,
                words=" behind a router with weights",
            )


def _vendors(problem: ServeProblem) -> Iterator[Grant]:
    """Yield every pair of pools of two vendors of which the release joins no instances."""
    if "disaggregated" not in problem.spec.goal.modes:
        return
    for sender, receiver in product(problem.serving_pools, problem.serving_pools):
        vendors = [one.machine.sheet.generation.vendor for one in (sender, receiver)]
        if vendors[0] is vendors[1] or not problem.kv_transfers.reach(sender, receiver):
            continue

        def between(
            one: ServeProblem, sender: ServingPool = sender, receiver: ServingPool = receiver
        ) -> ServeProblem:
            return _every_transfer(_between(one, sender=sender, receiver=receiver))

        lines = _pairs(between(problem))
        if lines and all(lines):
            yield Grant(
                mode="disaggregated",
                change=between,
                where=f"prefill on {sender.pool.name} and decode on {receiver.pool.name}",
                lacking=lines[0][0],
            )


def _every_transfer(problem: ServeProblem) -> ServeProblem:
    return replace(problem, kv_transfers=replace(problem.kv_transfers, refuses=False))


def _every_unit(problem: ServeProblem) -> ServeProblem:
    afd_units = problem.afd_units
    every = replace(afd_units, options=(*afd_units.options, *afd_units.refused), refused=())
    return replace(problem, afd_units=every)


def _between(problem: ServeProblem, *, sender: ServingPool, receiver: ServingPool) -> ServeProblem:
    """Return the problem with prefill on one pool and decode on another."""
    pool_of = {Role.PREFILL: sender.pool.name, Role.DECODE: receiver.pool.name}
    kept = tuple(
        option
        for option in problem.options.options
        if pool_of.get(option.role) == option.serving_pool.pool.name
    )
    return replace(problem, options=replace(problem.options, options=kept))


def _pairs(problem: ServeProblem) -> list[tuple[str, ...]]:
    """Return why each pair of options that reach each other is refused; empty: it is not."""
    kinds = {
        (option.role, option.serving_pool.pool.name, kept_by(option)): option
        for option in problem.options.options
    }.values()
    return [
        problem.kv_transfers.refusals(one, other)
        for one, other in product(kinds, kinds)
        if one.role is Role.PREFILL and other.role is Role.DECODE
        if problem.kv_transfers.reach(one.serving_pool, other.serving_pool)
    ]
