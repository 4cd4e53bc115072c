"""The integer program of instances: options become columns, pools and links their limits.

One program a mode. Aggregated instances serve requests from end to end; prefill instances hand over
to decode instances of the same pool over its cards, or of another pool over the link between them.
Where two pools have no link no request goes from one to the other.
"""

from dataclasses import dataclass
from typing import Final, Literal

from solvers.instances.problem import (
    Column,
    Group,
    InstancePlan,
    InstancesProblem,
    Link,
    Objective,
    Route,
)
from solvers.instances.problem import Pool as PoolOfDevices
from solvers.instances.problem import Role as SolverRole
from solvers.registry import INSTANCES
from solvers.result import Outcome
from tuner.costs.serving.engine import Degrees
from tuner.costs.serving.memory import kv_bytes_per_token
from tuner.planner.serve.demand import Demand
from tuner.planner.serve.options import Option, PoolSite
from tuner.serve_plan import Role
from tuner.spec.cluster import Cluster
from tuner.spec.serving.goal import ServeGoal

Mode = Literal["aggregated", "disaggregated"]

ROLES: Final[dict[Mode, tuple[Role, ...]]] = {
    "aggregated": (Role.AGGREGATED,),
    "disaggregated": (Role.PREFILL, Role.DECODE),
}
SOLVER_ROLE: Final = {
    Role.AGGREGATED: SolverRole.AGGREGATED,
    Role.PREFILL: SolverRole.PREFILL,
    Role.DECODE: SolverRole.DECODE,
}
OBJECTIVE: Final = {
    "cost": Objective.COST,
    "devices": Objective.DEVICES,
    "goodput": Objective.DEVICES,
}
"""With a rate to serve, the most good requests per device are those on the fewest devices."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """A mode's program, and what its columns stand for."""

    mode: Mode
    problem: InstancesProblem
    options: tuple[Option, ...]
    """By column."""
    sites: tuple[PoolSite, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """A program with its outcome."""

    program: Program
    outcome: Outcome[InstancePlan]


def program_of(
    mode: Mode,
    options: tuple[Option, ...],
    *,
    sites: tuple[PoolSite, ...],
    cluster: Cluster,
    goal: ServeGoal,
    demand: Demand,
    spare_ratio: float,
) -> Program | None:
    """State the program of one mode; None where a role has no option."""
    roles = ROLES[mode]
    chosen = tuple(option for option in options if option.role in roles)
    if any(all(option.role is not role for option in chosen) for role in roles):
        return None
    names = [(role, site.pool.name) for role in roles for site in sites]
    links, routes = _ways(mode, names, sites=sites, cluster=cluster, chosen=chosen, demand=demand)
    problem = InstancesProblem(
        pools=tuple(
            PoolOfDevices(name=site.pool.name, devices=site.pool.num_devices) for site in sites
        ),
        groups=tuple(
            Group(name=f"{role.value}@{pool}", role=SOLVER_ROLE[role]) for role, pool in names
        ),
        columns=tuple(
            _column(option, number, sites=sites, names=names)
            for number, option in enumerate(chosen)
        ),
        routes=routes,
        links=links,
        objective=OBJECTIVE[goal.objective],
        demand_per_s=demand.rate_per_s,
        spare_ratio=spare_ratio,
        max_kinds=2,
    )
    return Program(mode=mode, problem=problem, options=chosen, sites=sites)


def solve(program: Program, *, time_limit_s: float) -> Solved:
    """Choose the instances."""
    outcome = INSTANCES.solve(program.problem, time_limit_s=time_limit_s)
    return Solved(program=program, outcome=outcome)


def _column(
    option: Option,
    number: int,
    *,
    sites: tuple[PoolSite, ...],
    names: list[tuple[Role, str]],
) -> Column:
    pool = option.site.pool
    return Column(
        name=f"{number} {option.role.value}@{pool.name}",
        group=names.index((option.role, pool.name)),
        devices_P=tuple(option.devices if site.pool.name == pool.name else 0 for site in sites),
        rate_per_s=option.rate_per_s,
        price_per_hour=(pool.price_per_device_hour or 0.0) * option.devices,
    )


def request_bytes(option: Option, demand: Demand) -> float:
    """Bytes of the KV cache of a mean prompt, every head once."""
    whole = kv_bytes_per_token(option.iteration.decoder, option.iteration.formats, Degrees())
    return whole * demand.input_tokens


def _ways(
    mode: Mode,
    names: list[tuple[Role, str]],
    *,
    sites: tuple[PoolSite, ...],
    cluster: Cluster,
    chosen: tuple[Option, ...],
    demand: Demand,
) -> tuple[tuple[Link, ...], tuple[Route, ...]]:
    """Return links in both directions, and the routes between groups that they carry."""
    if mode == "aggregated":
        return (), ()
    each = request_bytes(chosen[0], demand)
    links: list[Link] = []
    number: dict[tuple[str, str], int] = {}
    for site in sites:
        number[site.pool.name, site.pool.name] = len(links)
        links.append(Link(name=f"cards of {site.pool.name}", bytes_per_s=cards_bytes_per_s(site)))
    for link in cluster.links:
        for sender, receiver in (link.between, link.between[::-1]):
            number[sender, receiver] = len(links)
            links.append(Link(name=f"{sender} to {receiver}", bytes_per_s=link.bandwidth))
    routes = tuple(
        Route(sender=out, receiver=into, request_bytes=each, links=(number[sender, receiver],))
        for out, (role, sender) in enumerate(names)
        if role is Role.PREFILL
        for into, (other, receiver) in enumerate(names)
        if other is Role.DECODE and (sender, receiver) in number
    )
    return tuple(links), routes


def cards_bytes_per_s(site: PoolSite) -> float:
    """What all network cards of a pool send together; half of them send, half receive."""
    pool, sheet = site.pool, site.machine.sheet
    card = pool.nic or sheet.scale_out_bytes_per_s
    return 0.5 * card * pool.nics * pool.nodes / pool.oversubscription
