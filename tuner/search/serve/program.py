"""The integer program of instances: options become its columns, pools and links its limits.

Spare capacity of prefill keeps queueing delays short. By Pollaczek and Khinchine's form a server of
service time s keeps its mean wait of equal jobs below w at a load of 1 / (1 + s / (2 w)), so that a
slow instance needs more of it than a fast one for the same TTFT target t: the spare capacity of an
option is scaled by s / (t - s) over the least such ratio.

One program a mode. Aggregated instances serve requests from end to end, on whole devices or
multiplexed; prefill instances send KV caches to decode instances of the same pool over its NICs, or
of another pool over the link between them. Where long prompts are offloaded, the remote instances
are the program's prefill and the local ones its decode (modes/prefill_offload.py). Pools of several
vendors may be islands, each behind a router of its own (islands.py): every island has its kinds, no
route leaves it, and the program splits the requests among them. A route joins two groups of options
whose pools reach each other and whose layouts the engine's release accepts.

Options of one role, pool, tensor degree and pipeline lay out their caches equally. Where two such
layouts reach the same others and move the same bytes to each, as GQA caches mostly do, they are one
group: the fewer groups, the more of their columns are dominated and dropped.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from types import MappingProxyType
from typing import Final

from solvers.instances.problem import (
    Column,
    ColumnGroup,
    DevicePool,
    InstanceObjective,
    InstancePlan,
    InstanceRole,
    InstancesProblem,
    Route,
    TransferLink,
)
from solvers.registry import INSTANCES
from solvers.result import Outcome, Status
from tuner.catalog.serve_rules.rules import is_disaggregated
from tuner.config.serve import Role
from tuner.search.serve.demand import Demand
from tuner.search.serve.kv_transfers import KvTransfers, nic_bytes_per_s
from tuner.search.serve.options import Layout, Option, ServingPool
from tuner.spec.serving.goal import Mode

OBJECTIVE: Final = {
    "cost": InstanceObjective.COST,
    "devices": InstanceObjective.DEVICES,
    "goodput": InstanceObjective.DEVICES,
    "rate": InstanceObjective.RATE,
}
"""Objective of the program by that of the goal. With a rate to serve, the most good requests per
device are those on the fewest devices."""

LEAST_SLACK_S: Final = 1e-3
"""Least seconds between a prompt alone and the target of the first token."""
MOST_TIMES: Final = 10.0
"""Largest multiple of the least spare capacity that a slow prefill instance needs."""
LEAST_RUN_S: Final = 0.05
"""Seconds that a solve of one branch gets at least, even after the limit."""
LEAST_LOAD_RATIO: Final = 1e-3
"""Smallest rate that is solved for, as a share of the slowest instance's: less traffic needs as
many instances, and solvers take it for none."""
LEAST_FLOW_RATIO: Final = 1e-6
"""Share of all requests below which a route is unused (the solver's tolerance)."""
BOUND_TOLERANCE: Final = 1e-6
"""Relative gap below which a plan counts as optimal, as in the solvers."""


Others = tuple[tuple[Layout, int], ...]
"""The keys that a key has a route to, and the bytes of a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """Capacity above what the traffic needs, as a share of it."""

    prefill_ratio: float
    """Spare capacity of the prefill instances that are fastest for their target."""
    others_ratio: float
    """Spare capacity of decode and aggregated instances."""

    @property
    def most_ratio(self) -> float:
        """Return the larger of both ratios."""
        return max(self.prefill_ratio, self.others_ratio)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A mode's program, and the options of its columns."""

    mode: Mode
    problem: InstancesProblem
    options: tuple[Option, ...]
    """Option of each column."""
    islands: Mapping[str, str] = field(default_factory=dict)
    """Island of each pool, by name; empty with a single router."""
    cells: int = 0
    """Cells that have these instances each (cells.py); 0: instances are anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SolvedProgram:
    """A program with its outcome."""

    program: Program
    outcome: Outcome[InstancePlan]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KvRoutes:
    """Groups, links and routes of a program."""

    groups: tuple[ColumnGroup, ...]
    group_of_layout: dict[Layout, int]
    links: tuple[TransferLink, ...]
    routes: tuple[Route, ...]

    def group(self, option: Option) -> int:
        """Return the group of an option."""
        return self.group_of_layout[option.layout]


def program_roles(mode: Mode) -> tuple[Role, ...]:
    """Return the roles of a mode's columns: beside prefill, whatever launches is decode."""
    return (Role.PREFILL, Role.DECODE) if is_disaggregated(mode) else (Role.AGGREGATED,)


def build_program(
    mode: Mode,
    options: tuple[Option, ...],
    *,
    serving_pools: tuple[ServingPool, ...],
    kv_transfers: KvTransfers,
    demand: Demand,
    spare: Spare,
    most_rate: bool = False,
    most_kinds: int = 1,
    islands: Mapping[str, str] = MappingProxyType({}),
) -> Program | None:
    """Build the program of one mode; None where a role has no option.

    Args:
        mode: that is solved.
        options: instance options, other roles' included.
        serving_pools: pools.
        kv_transfers: paths and refusals of pairs of options.
        demand: the traffic.
        spare: capacity beyond it.
        most_kinds: of instances in one role, of one island where there are several.
        islands: of pools, by name, where each has a router of its own.
        most_rate: maximise the request rate of all pools instead of meeting the demand.
    """
    roles = program_roles(mode)
    chosen = tuple(option for option in options if option.role in roles)
    if any(all(option.role is not role for option in chosen) for role in roles):
        return None
    kv_routes = build_kv_routes(chosen, kv_transfers, serving_pools, islands=islands)
    if Role.DECODE in roles and not kv_routes.routes:
        return None
    objective = InstanceObjective.RATE if most_rate else OBJECTIVE[kv_transfers.spec.goal.objective]
    least_per_s = LEAST_LOAD_RATIO * min(option.rate_per_s for option in chosen)
    problem = InstancesProblem(
        pools=tuple(
            DevicePool(name=serving_pool.pool.name, devices=serving_pool.pool.num_devices)
            for serving_pool in serving_pools
        ),
        groups=kv_routes.groups,
        columns=tuple(
            _column(
                option,
                number,
                serving_pools=serving_pools,
                group=kv_routes.group(option),
                rate_per_s=rate,
            )
            for number, (option, rate) in enumerate(
                zip(chosen, _rates_per_s(chosen, spare, demand), strict=True)
            )
        ),
        routes=kv_routes.routes,
        links=kv_routes.links,
        objective=objective,
        demand_per_s=max(demand.rate_per_s, least_per_s) if objective.rate_is_fixed else 0.0,
        spare_ratio=spare.others_ratio,
        max_kinds=most_kinds,
    )
    return Program(mode=mode, problem=problem, options=chosen, islands=islands)


def build_kv_routes(
    options: tuple[Option, ...],
    kv_transfers: KvTransfers,
    serving_pools: tuple[ServingPool, ...],
    *,
    islands: Mapping[str, str] = MappingProxyType({}),
) -> KvRoutes:
    """Group options and connect the groups.

    Args:
        options: of the roles of one mode.
        kv_transfers: paths and refusals of pairs of options.
        serving_pools: pools.
        islands: of pools, by name, where each has a router of its own.
    """
    kinds: dict[Layout, Option] = {}
    for option in options:
        kinds.setdefault(option.layout, option)
    bytes_of = {
        (out, into): round(kv_transfers.moved(sender, receiver).whole)
        for out, sender in kinds.items()
        if sender.role is Role.PREFILL
        for into, receiver in kinds.items()
        if receiver.role is Role.DECODE
        and kv_transfers.reach(sender.serving_pool, receiver.serving_pool)
        if islands.get(out[1]) == islands.get(into[1])
        if not (kv_transfers.refuses and kv_transfers.refusals(sender, receiver))
    }
    members: dict[tuple[Role, str, Others], list[Layout]] = {}
    for key in kinds:
        after = tuple((into, size) for (out, into), size in bytes_of.items() if out == key)
        before = tuple((out, size) for (out, into), size in bytes_of.items() if into == key)
        members.setdefault((*key[:2], (*after, *before)), []).append(key)
    group_of_layout = {key: number for number, keys in enumerate(members.values()) for key in keys}
    links, number_of = _links(kv_transfers, serving_pools)
    routes = {
        (group_of_layout[out], group_of_layout[into]): Route(
            sender=group_of_layout[out],
            receiver=group_of_layout[into],
            request_bytes=float(size),
            links=(number_of[out[1], into[1]],),
        )
        for (out, into), size in bytes_of.items()
    }
    return KvRoutes(
        groups=tuple(_group(keys, islands) for keys in members.values()),
        group_of_layout=group_of_layout,
        links=links if routes else (),
        routes=tuple(routes.values()),
    )


def _group(keys: list[Layout], islands: Mapping[str, str]) -> ColumnGroup:
    role, pool, *_ = keys[0]
    degrees = "-".join(
        f"{tensor}pp{stages}" if stages > 1 else str(tensor) for _, _, tensor, stages in keys
    )
    names = tuple(dict.fromkeys(islands.values()))
    return ColumnGroup(
        name=f"{role.value}@{pool}/tp{degrees}",
        role=InstanceRole(role.value),
        island=names.index(islands[pool]) if islands else 0,
    )


def _links(
    kv_transfers: KvTransfers, serving_pools: tuple[ServingPool, ...]
) -> tuple[tuple[TransferLink, ...], dict[tuple[str, str], int]]:
    """Return links in both directions, and the number of each by its ends."""
    links: list[TransferLink] = []
    number: dict[tuple[str, str], int] = {}
    for serving_pool in serving_pools:
        number[serving_pool.pool.name, serving_pool.pool.name] = len(links)
        inside = kv_transfers.inside_bytes_per_s(serving_pool, serving_pool)
        rank_bytes_per_s = inside or nic_bytes_per_s(serving_pool)
        links.append(
            TransferLink(
                name=f"{'NICs' if inside is None else 'devices'} of {serving_pool.pool.name}",
                # Half of them send, half receive.
                bytes_per_s=0.5 * rank_bytes_per_s * serving_pool.pool.num_devices,
            )
        )
    for link in kv_transfers.spec.cluster.links:
        for sender, receiver in (link.between, link.between[::-1]):
            number[sender, receiver] = len(links)
            links.append(TransferLink(name=f"{sender} to {receiver}", bytes_per_s=link.bandwidth))
    return tuple(links), number


def solve_program(program: Program, *, time_limit_s: float) -> SolvedProgram:
    """Choose instances such that every prefill-decode pair of an island has a route.

    Routers pair instances freely. Where the chosen ones hold a pair without a route, one of
    the two groups must stay out, so both are tried; the least bound of the branches is the bound.
    """
    outcome = _solve_paired(program.problem, deadline_s=time.perf_counter() + time_limit_s)
    return SolvedProgram(program=program, outcome=outcome)


def _solve_paired(problem: InstancesProblem, *, deadline_s: float) -> Outcome[InstancePlan]:
    left_s = max(LEAST_RUN_S, deadline_s - time.perf_counter())
    outcome = INSTANCES.solve(problem, time_limit_s=left_s)
    if outcome.solution is None:
        return outcome
    pair = unrouted_pair(problem, outcome.solution)
    if pair is None:
        return outcome
    # Groups with the same routes stay out together, so that branches are few.
    senders, receivers = _interchangeable(problem.routes, pair)
    branches = [
        _solve_without(problem, dropped, deadline_s=deadline_s)
        for dropped in (
            [route.sender in senders for route in problem.routes],
            [route.receiver in receivers for route in problem.routes],
        )
    ]
    best = min(branches, key=lambda branch: branch.objective)
    bound = min(branch.bound for branch in branches)
    if best.status is Status.OPTIMAL and bound < best.objective * (1.0 - BOUND_TOLERANCE):
        return replace(best, bound=bound, status=Status.FEASIBLE)
    return replace(best, bound=bound)


def _solve_without(
    problem: InstancesProblem, dropped: list[bool], *, deadline_s: float
) -> Outcome[InstancePlan]:
    """Solve without some routes; the plan still has a flow for each of all."""
    kept = tuple(route for route, gone in zip(problem.routes, dropped, strict=True) if not gone)
    outcome = _solve_paired(replace(problem, routes=kept), deadline_s=deadline_s)
    if outcome.solution is None:
        return outcome
    flows = iter(outcome.solution.flow_per_s_E)
    whole = tuple(0.0 if gone else next(flows) for gone in dropped)
    return replace(outcome, solution=replace(outcome.solution, flow_per_s_E=whole))


def _interchangeable(
    routes: tuple[Route, ...], pair: tuple[int, int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Return the groups with the same receivers, and those with the same senders, as the pair.

    No group of the first set has a route to one of the second where the pair has none.
    """
    after: dict[int, set[int]] = {}
    before: dict[int, set[int]] = {}
    for route in routes:
        after.setdefault(route.sender, set()).add(route.receiver)
        before.setdefault(route.receiver, set()).add(route.sender)
    return (
        frozenset(group for group, others in after.items() if others == after[pair[0]]),
        frozenset(group for group, others in before.items() if others == before[pair[1]]),
    )


def unrouted_pair(problem: InstancesProblem, plan: InstancePlan) -> tuple[int, int] | None:
    """Return two groups of one island that both serve and have no route between them."""
    carried = [
        route
        for route, flow in zip(problem.routes, plan.flow_per_s_E, strict=True)
        if flow > LEAST_FLOW_RATIO * plan.rate_per_s
    ]
    legal = {(route.sender, route.receiver) for route in problem.routes}
    pairs = product({route.sender for route in carried}, {route.receiver for route in carried})
    island = [group.island for group in problem.groups]
    return next(
        (
            (sender, receiver)
            for sender, receiver in sorted(pairs)
            if (sender, receiver) not in legal and island[sender] == island[receiver]
        ),
        None,
    )


def serving_instances(solved: SolvedProgram) -> Iterator[tuple[Option, int]]:
    """Options with the instances that serve requests; others are not launched."""
    plan, problem = solved.outcome.solution, solved.program.problem
    if plan is None:
        return
    used_groups = {
        endpoint
        for route, flow in zip(problem.routes, plan.flow_per_s_E, strict=True)
        if flow > LEAST_FLOW_RATIO * plan.rate_per_s
        for endpoint in (route.sender, route.receiver)
    }
    for number, count in enumerate(plan.count_J):
        role = problem.role_of(number)
        if count and (
            role is InstanceRole.AGGREGATED or problem.columns[number].group in used_groups
        ):
            yield solved.program.options[number], count


def _rates_per_s(options: tuple[Option, ...], spare: Spare, demand: Demand) -> tuple[float, ...]:
    """Rates with the spare of prefill taken off; the program's own spare is that of the others."""
    slow_J = [
        option.ttft_s / max(demand.ttft_s - option.ttft_s, LEAST_SLACK_S) for option in options
    ]
    of_prefill = [
        slow
        for option, slow in zip(options, slow_J, strict=True)
        if option.role is Role.PREFILL and slow > 0.0
    ]
    least = min(of_prefill, default=1.0)
    rates = []
    for option, slow in zip(options, slow_J, strict=True):
        rate = option.rate_per_s
        if option.role is Role.PREFILL:
            times = min(max(slow / least, 1.0), MOST_TIMES)
            rate *= (1.0 + spare.others_ratio) / (1.0 + spare.prefill_ratio * times)
        rates.append(rate)
    return tuple(rates)


def _column(
    option: Option,
    number: int,
    *,
    serving_pools: tuple[ServingPool, ...],
    group: int,
    rate_per_s: float,
) -> Column:
    pool = option.serving_pool.pool
    return Column(
        name=f"{number} {option.role.value}@{pool.name}",
        group=group,
        devices_P=tuple(
            option.devices if serving_pool.pool.name == pool.name else 0
            for serving_pool in serving_pools
        ),
        rate_per_s=rate_per_s,
        price_per_hour=(pool.price_per_device_hour or 0.0) * option.devices,
    )
