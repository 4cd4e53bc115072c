"""Features that engines, their routers and connectors lack, and what they would save.

A mode that is refused is solved already. Every other lack is the least change of the problem that
lifts it (`Lack`), and the problem is solved again with it by the search that plans:

    a KV transfer           between instances that the connector refuses
    an AFD unit             of sizes that the plugin refuses
    a router with weights   routers of prefill and decode instances, and Dynamo's frontend, have
                            none: unequal instances get as many outstanding requests each; nor has
                            an autoscaler a target for unequal ones
    two vendors             each way round, prefill on the one and decode on the other, whatever it
                            takes: every rule between vendors is listed
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Final

from tuner.catalog.serve_rules.autoscalers import named_autoscaler
from tuner.catalog.serve_rules.routers import router_with
from tuner.catalog.serve_rules.rules import is_disaggregated
from tuner.config.serve import Role
from tuner.config.serve_words import target_words
from tuner.costs.serve.bands import PUBLISHED
from tuner.plans.serve import ServeUnlaunchable
from tuner.search.change import Change
from tuner.search.serve.kv_transfers import kept_by
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.most_rate import solve_goal
from tuner.search.serve.options import ServingPool
from tuner.search.serve.preference import gain_ratio, lost_by, objective_value
from tuner.search.serve.problem import ModeSolution, ModeSolutions, ServeProblem, restrict_problem
from tuner.search.serve.routers import (
    MOST_KINDS,
    RouterChoice,
    has_sessions,
    stack_routers,
)
from tuner.search.serve.to_plan import describe_solution, solution_refusals
from tuner.spec.serving.goal import Mode
from tuner.spec.serving.routers import RouterPolicy
from tuner.units import format_counted

LEAST_GAIN_RATIO: Final = 1e-6
"""Smallest gain that counts; less is the solver's tolerance."""
WEIGHTED: Final = RouterPolicy.WEIGHTED_LEAST_REQUESTS


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lack(Change[ServeProblem]):
    """The least change that lets a mode use what is lacking: the software and its feature.

    Without a name of what is lacking, it is what the release refuses of the solution. The words
    follow the description of the solution, or name the deployment where there is none to beat.
    """

    mode: Mode
    """Mode that the changed problem is solved in."""
    than: ModeSolution | None = None
    """Solution that the changed problem's has to beat to be named; None: it is named anyway."""


def unlaunchable(problem: ServeProblem, solutions: ModeSolutions) -> Iterator[ServeUnlaunchable]:
    """Name everything that is not launchable, with what it would save against the chosen plan."""
    best = solutions.best
    for solution in solutions.serving:
        if (lines := solutions.refused[solution.mode]) and not solution.missed:
            is_published = solution.mode in PUBLISHED
            why = lines[0] + ("" if is_published else "; no published run backs this mode")
            yield _named(problem, solution, best, what=describe_solution(solution), why=why)
    lacks = [] if best is None else [*_rules(problem, solutions, best), *_routers(problem, best)]
    for lack in (*lacks, *_vendors(problem)):
        yield from _changed(problem, lack, best)


def _changed(
    problem: ServeProblem, lack: Lack, best: ModeSolution | None
) -> Iterator[ServeUnlaunchable]:
    """Solve the changed problem; nothing where that saves nothing that was to be named."""
    changed = restrict_problem(problem, lack.apply)
    solution = solve_goal(changed, lack.mode, before=lack.than)
    if lack.than is None:
        named = _named(problem, solution, best, what=lack.words, why=lack.limit)
        yield named.model_copy(update={"rule": _rule(lack.limit) or "layout"})
        return
    if solution is None or solution.missed:
        return
    refused = solution_refusals(solution, problem)
    goal, why = problem.spec.goal, next(iter(refused), "")
    # A rule between vendors is named by a change of its own.
    if bool(why) == bool(lack.limit) or _rule(why):
        return
    if gain_ratio(objective_value(solution, goal), lack.than, goal) > LEAST_GAIN_RATIO:
        what = describe_solution(solution) + lack.words
        yield _named(problem, solution, best, what=what, why=lack.limit or why)


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


def _rules(problem: ServeProblem, solutions: ModeSolutions, best: ModeSolution) -> Iterator[Lack]:
    """Yield what the release refuses of KV transfers and of the options of single modes."""
    pairs = _pairs(problem)
    if "disaggregated" in problem.spec.goal.modes and any(pairs):
        yield Lack(limit="", words="", apply=_every_transfer, mode="disaggregated", than=best)
    for mode, priced in problem.own_options.items():
        launched = solutions.of(mode)
        if launched is not None and priced.options and priced.refused_units:
            yield Lack(
                limit="",
                words=f", where launched {load_mode(mode).option_noun} take {launched.devices}",
                apply=partial(_every_unit, mode=mode),
                mode=mode,
                than=launched,
            )


def _routers(problem: ServeProblem, best: ModeSolution) -> Iterator[Lack]:
    """Yield modes whose routers know no weights; for sessions they would look for prefixes too."""
    spec = problem.spec
    goal, autoscaler = spec.goal, named_autoscaler(spec.emit)
    stacks = stack_routers(spec.emit, spec.releases.values())
    routed = sorted(mode for mode in set(goal.modes) if load_mode(mode).is_routed)
    for mode in () if has_sessions(goal) else routed:
        splits_roles = is_disaggregated(mode)
        lacking = next(
            (
                f"{stack[0].name} {stack[0].release} has no {WEIGHTED.value}"
                for stack in stacks
                if router_with(stack, WEIGHTED, is_disaggregated=splits_roles) is None
            ),
            f"{autoscaler} counts one kind of instances a role" if autoscaler else "",
        )
        router = RouterChoice(
            policy=RouterPolicy.LEAST_REQUESTS,
            mixed_policy=WEIGHTED,
            decode_policy=WEIGHTED if splits_roles else None,
            most_kinds=MOST_KINDS,
        )
        if lacking:
            yield Lack(
                limit=lacking + " of prefill and decode instances" * splits_roles,
                words=" behind a router with weights",
                apply=partial(_behind, router=router),
                mode=mode,
                than=best,
            )


def _vendors(problem: ServeProblem) -> Iterator[Lack]:
    """Yield every pair of pools of two vendors of which the release joins no instances."""
    if "disaggregated" not in problem.spec.goal.modes:
        return
    for sender, receiver in product(problem.serving_pools, problem.serving_pools):
        vendors = {pool.machine.sheet.generation.vendor for pool in (sender, receiver)}
        if len(vendors) == 1 or not problem.kv_transfers.reach(sender, receiver):
            continue
        between = partial(_between, sender=sender, receiver=receiver)
        lines = _pairs(between(problem))
        if lines and all(lines):
            yield Lack(
                limit=lines[0][0],
                words=f"prefill on {sender.pool.name} and decode on {receiver.pool.name}",
                apply=between,
                mode="disaggregated",
            )


def _behind(problem: ServeProblem, *, router: RouterChoice) -> ServeProblem:
    return replace(problem, routers=(router,))


def _every_transfer(problem: ServeProblem) -> ServeProblem:
    return replace(problem, kv_transfers=replace(problem.kv_transfers, refuses=False))


def _every_unit(problem: ServeProblem, *, mode: Mode) -> ServeProblem:
    priced = problem.own_options[mode]
    every = replace(priced, options=(*priced.options, *priced.refused_units), refused_units=())
    return replace(problem, own_options={**problem.own_options, mode: every})


def _between(problem: ServeProblem, *, sender: ServingPool, receiver: ServingPool) -> ServeProblem:
    """Return the problem with prefill on one pool, decode on another and every transfer."""
    pool_of = {Role.PREFILL: sender.pool.name, Role.DECODE: receiver.pool.name}
    kept = tuple(
        option
        for option in problem.options.options
        if pool_of.get(option.role) == option.serving_pool.pool.name
    )
    options = replace(problem.options, options=kept)
    return _every_transfer(replace(problem, options=options, own_options={}))


def _pairs(problem: ServeProblem) -> list[tuple[str, ...]]:
    """Return why each pair of options that reach each other is refused; empty: it is not."""
    kinds = {
        (option.role, option.serving_pool.pool.name, kept_by(option)): option
        for option in problem.options.options
    }.values()
    return [
        problem.kv_transfers.refusals(sender, receiver)
        for sender, receiver in product(kinds, kinds)
        if sender.role is Role.PREFILL and receiver.role is Role.DECODE
        if problem.kv_transfers.reach(sender.serving_pool, receiver.serving_pool)
    ]
