"""Why a mode serves nothing: the resource that runs out first, and at which value.

A role without any instance lacks memory, or misses a target with one request alone. Where every
role has instances, the integer program with the rate as its objective says how much the pools
serve; solved once more as if links had no limit, whether NICs and links bind or the devices. What
keeps a device from serving more is room for KV caches or a target, whichever ends its batch.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tuner.catalog.serve_rules.rules import ROLES, absent_mode
from tuner.config.serve import Role
from tuner.search.serve.demand import MOST_RUNNING
from tuner.search.serve.islands import island_layouts
from tuner.search.serve.modes.mode import load_mode
from tuner.search.serve.options import Option, Options
from tuner.search.serve.problem import ServeProblem
from tuner.search.serve.program import (
    SolvedProgram,
    program_roles,
    serving_instances,
    solve_program,
)
from tuner.search.serve.solve_mode import goal_spare, solve_program_of
from tuner.spec.serving.goal import Mode
from tuner.units import format_bytes, format_counted, format_s

NO_LIMIT: Final = 1e18
"""Bytes a second of a link that never binds."""
LEAST_GAIN_RATIO: Final = 1.01
"""Rate without limits of links over that with them, from which on links bind."""


def explain_no_solution(mode: Mode, problem: ServeProblem) -> str:
    """Say why a mode serves nothing."""
    if line := load_mode(mode).explain(problem):
        return line
    if problem.options.slowest_tpot_s == float("inf"):
        return "memory: no parallel layout of the model leaves room for one request"
    # Options of the mode alone are solved where a release refuses them, too.
    if (
        mode not in problem.launchable_modes
        and not problem.own_options.get(mode, Options()).refused_units
    ):
        return absent_mode(problem.spec.main_release, mode)
    for role, line in problem.options.refused.items():
        if role in ROLES[mode]:
            return line
    return _binding_resource(problem, mode)


def most_of_pools(problem: ServeProblem, mode: Mode) -> Iterator[SolvedProgram]:
    """Yield the instances of all pools that serve the most requests a second, without queueing."""
    for variant in load_mode(mode).variants(problem):
        for islands in island_layouts(problem.spec, mode):
            solved = solve_program_of(
                variant, mode, goal_spare(problem), islands=islands, most_rate=True
            )
            if solved is not None:
                yield solved


def rate_of(solved: SolvedProgram, problem: ServeProblem) -> float:
    """Return the requests a second of a solution, the goal's spare capacity taken off."""
    plan = solved.outcome.solution
    return 0.0 if plan is None else plan.rate_per_s / (1.0 + problem.spec.goal.spare_ratio)


def _binding_resource(problem: ServeProblem, mode: Mode) -> str:
    """Name what keeps a mode from serving the traffic."""
    demand = problem.demand
    priced = next(iter(load_mode(mode).variants(problem)), problem).options.options
    for role in program_roles(mode):
        if not any(option.role is role for option in priced):
            return f"{role.value}: {_unpriced_cause(problem, role)}"
    best = max(
        most_of_pools(problem, mode), key=lambda solved: rate_of(solved, problem), default=None
    )
    if best is None:
        return _too_few_devices(problem, mode, priced)
    most_per_s, links = rate_of(best, problem), best.program.problem.links
    wide = replace(
        best.program.problem, links=tuple(replace(link, bytes_per_s=NO_LIMIT) for link in links)
    )
    wider = solve_program(
        replace(best.program, problem=wide), time_limit_s=problem.settings.time_limit_s / 4.0
    )
    served = f"at most {most_per_s:.3g} of {demand.rate_per_s:.3g} requests/s"
    if links and rate_of(wider, problem) > LEAST_GAIN_RATIO * most_per_s:
        request_bytes = max(route.request_bytes for route in best.program.problem.routes)
        rates = ", ".join(f"{link.name} {format_bytes(int(link.bytes_per_s))}/s" for link in links)
        return (
            f"KV transfers: {served}, as a request moves {format_bytes(int(request_bytes))}"
            f" and what sends them has {rates}"
        )
    used = [option for option, _ in serving_instances(best) if option.role is not Role.PREFILL]
    slowest = min(used, key=lambda option: option.rate_per_s / option.devices)
    devices = sum(serving_pool.pool.num_devices for serving_pool in problem.serving_pools)
    return f"devices: {devices} serve {served}; {_batch_end(slowest, problem)}"


def _unpriced_cause(problem: ServeProblem, role: Role) -> str:
    """Say why no instance of a role is priced."""
    options, demand = problem.options, problem.demand
    if role is not Role.DECODE and options.slowest_ttft_s > demand.ttft_s:
        return f"TTFT: a prompt alone takes {format_s(options.slowest_ttft_s)}"
    if role is not Role.PREFILL and options.slowest_tpot_s > demand.tpot_s:
        return f"TPOT: a request alone takes {format_s(options.slowest_tpot_s)} a token"
    return next(iter(options.illegal_by), "no instance of it is priced")


def _too_few_devices(problem: ServeProblem, mode: Mode, priced: tuple[Option, ...]) -> str:
    """Say what one instance of each role takes, or that no route joins them."""
    least = {
        role: min(option.devices for option in priced if option.role is role)
        for role in program_roles(mode)
    }
    needed = " and ".join(f"{devices} for {role.value}" for role, devices in least.items())
    devices = sum(serving_pool.pool.num_devices for serving_pool in problem.serving_pools)
    if sum(least.values()) > devices:
        present = format_counted(devices, "device")
        return f"memory: one instance of each takes {needed}; the pools have {present}"
    return f"KV transfers: no route joins instances of {' and '.join(r.value for r in least)}"


def _batch_end(option: Option, problem: ServeProblem) -> str:
    """Say what ends the batch of an instance that decodes: requests, KV room or the TPOT target."""
    limit_s, running = problem.demand.tpot_s, option.running
    if running >= min(MOST_RUNNING, problem.demand.most_at_once):
        return f"batch: {running} sequences a rank, all that are in flight or priced"
    tokens = problem.demand.held_tokens
    curve = next(
        (
            candidate
            for candidate in problem.options.curves
            if candidate.option.degrees == option.degrees
            and candidate.option.role is option.role
            and candidate.option.serving_pool is option.serving_pool
        ),
        None,
    )
    if curve is not None and running < curve.running_N[-1] and limit_s < math.inf:
        taken = f"{format_s(option.tpot_s)} of {format_s(limit_s)}"
        return f"TPOT: {running} sequences a rank take {taken} a token"
    return f"KV room: {running} sequences of {tokens:,.0f} tokens a rank"
