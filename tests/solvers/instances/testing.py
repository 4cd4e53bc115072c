"""Instances for tests and benchmarks: tiny random ones, and a mixed pool of three kinds of GPU.

Letters: P pools.
"""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from solvers.instances.problem import (
    Column,
    ColumnGroup,
    DevicePool,
    InstanceObjective,
    InstanceRole,
    InstancesProblem,
    Route,
    TransferLink,
)


def one_pool(**changes: Any) -> InstancesProblem:
    """Twelve devices, each 5.6 requests/s of prefill or 10 of decode, ten requests/s to serve.

    Round numbers of DistServe's motivating example (arXiv:2401.09670), where two and one serve 10.
    """
    given: dict[str, Any] = {
        "pools": (DevicePool(name="a100", devices=12),),
        "groups": (
            ColumnGroup(name="prefill", role=InstanceRole.PREFILL),
            ColumnGroup(name="decode", role=InstanceRole.DECODE),
        ),
        "columns": (
            Column(name="p", group=0, devices_P=(1,), rate_per_s=5.6, price_per_hour=2.0),
            Column(name="d", group=1, devices_P=(1,), rate_per_s=10.0, price_per_hour=2.0),
        ),
        "routes": (Route(sender=0, receiver=1),),
        "objective": InstanceObjective.DEVICES,
        "demand_per_s": 10.0,
    }
    return InstancesProblem(**(given | changes))


def tiny_problem(rng: np.random.Generator, objective: InstanceObjective) -> InstancesProblem:
    """A random instance small enough to try everything, sometimes without a solution.

    Small integers on purpose: ties and limits that are met exactly are frequent.
    """
    num_pools, num_classes = int(rng.integers(1, 3)), int(rng.integers(1, 3))
    roles = [InstanceRole.DECODE] + [InstanceRole.PREFILL] * num_classes
    more = [InstanceRole.AGGREGATED, *InstanceRole]
    roles += [more[number] for number in rng.integers(len(more), size=int(rng.integers(0, 3)))]
    groups = tuple(
        ColumnGroup(name=f"group {number}", role=role, request_class=number % num_classes)
        for number, role in enumerate(roles)
    )
    num_links = int(rng.integers(0, 3))
    fixed = objective.rate_is_fixed or rng.random() < 0.5
    problem = InstancesProblem(
        pools=tuple(
            DevicePool(name=f"pool {p}", devices=int(rng.integers(3, 7))) for p in range(num_pools)
        ),
        groups=groups,
        columns=tuple(
            _tiny_column(rng, number % len(groups), groups, num_pools)
            for number in range(int(rng.integers(len(groups), 7)))
        ),
        routes=_some_routes(rng, groups, num_links),
        links=tuple(
            TransferLink(name=f"link {k}", bytes_per_s=float(rng.integers(2, 9)))
            for k in range(num_links)
        ),
        share_C=(1.0,) if num_classes == 1 else (0.25, 0.75),
        objective=objective,
        demand_per_s=float(rng.integers(2, 7)) if fixed else 0.0,
        spare_ratio=float(rng.choice([0.0, 0.25])),
        max_kinds=int(rng.integers(1, 3)) if rng.random() < 0.3 else None,
    )
    return _in_islands(rng, problem) if rng.random() < 0.3 else problem


def _in_islands(rng: np.random.Generator, problem: InstancesProblem) -> InstancesProblem:
    """Deal the groups out to two islands, and leave out the routes between them."""
    groups = tuple(replace(group, island=int(rng.integers(2))) for group in problem.groups)
    routes = tuple(
        route
        for route in problem.routes
        if groups[route.sender].island == groups[route.receiver].island
    )
    return replace(problem, groups=groups, routes=routes, max_kinds=1)


def _tiny_column(
    rng: np.random.Generator, group: int, groups: tuple[ColumnGroup, ...], num_pools: int
) -> Column:
    devices_P = rng.integers(0, 2, size=num_pools)
    devices_P[int(rng.integers(num_pools))] += 1
    fastest = 3 if groups[group].role is InstanceRole.AGGREGATED else 8
    return Column(
        name=f"{groups[group].role} of group {group}",
        group=group,
        devices_P=tuple(devices_P.tolist()),
        rate_per_s=float(rng.integers(1, fastest + 1)),
        price_per_hour=float(rng.integers(1, 9)),
    )


def _some_routes(
    rng: np.random.Generator, groups: tuple[ColumnGroup, ...], num_links: int
) -> tuple[Route, ...]:
    pairs = itertools.product(range(len(groups)), range(len(groups)))
    return tuple(
        Route(
            sender=sender,
            receiver=receiver,
            request_bytes=float(rng.integers(1, 4)),
            links=tuple(k for k in range(num_links) if rng.random() < 0.7),
        )
        for sender, receiver in pairs
        if groups[sender].role is InstanceRole.PREFILL
        and groups[receiver].role is InstanceRole.DECODE
        and rng.random() < 0.9
    )


KINDS: tuple[tuple[str, int, float, float, float], ...] = (
    ("h100", 16, 1.0, 1.0, 3.0),
    ("l40s", 32, 0.36, 0.26, 0.9),
    ("h20", 8, 0.15, 1.2, 1.8),
)
"""Name, devices, compute and memory bandwidth beside an H100 (dense bf16 989, 362 and 148 TFLOP/s;
3.35, 0.86 and 4.0 TB/s, of the vendors' datasheets), and a plausible price per device-hour."""

COLUMNS_PER_GROUP = 30
LARGEST_INSTANCE = 8
"""Devices of the largest instance."""
SIZE_EXPONENT = 1.15
"""An instance of twice the devices serves 2.2 times: weights leave more room for KV caches."""
REQUEST_BYTES = 2.0e9
"""KV cache of one request: about 12k tokens of 160 kB."""
LINK_BYTES_PER_S = 12.5e9
"""Between two pools, each direction: one 100 Gbit/s NIC."""


def mixed_pool(seed: int = 0, **changes: Any) -> InstancesProblem:
    """16 H100, 32 L40S and 8 H20: thirty columns for each pool and role, and pairs of pools.

    Prefill scales with compute and decode with memory bandwidth; each column has a size and a rate
    of its own, 15 % about that, so that about a third of them is undominated. Decode with attention
    on H100 and experts on H20 comes in 36 pairs of sizes. Plausible numbers, not measurements.
    """
    rng = np.random.default_rng(seed)
    groups = [
        ColumnGroup(name=f"{kind[0]} {role}", role=role)
        for kind, role in itertools.product(KINDS, InstanceRole)
    ]
    columns = [
        _random_column(rng, number, group.role)
        for number, group in enumerate(groups)
        for _ in range(COLUMNS_PER_GROUP)
    ]
    disaggregated = len(groups)
    groups.append(ColumnGroup(name="h100 attention, h20 experts", role=InstanceRole.DECODE))
    columns += [
        Column(
            name=f"attention x{attention}, experts x{experts}",
            group=disaggregated,
            devices_P=(attention, 0, experts),
            rate_per_s=1.8 * attention**0.6 * experts**0.55,
            price_per_hour=KINDS[0][4] * attention + KINDS[2][4] * experts,
        )
        for attention, experts in itertools.product(range(1, 7), range(1, 7))
    ]
    links, routes = _links_and_routes(groups, disaggregated_pool=0)
    given: dict[str, Any] = {
        "pools": tuple(DevicePool(name=name, devices=devices) for name, devices, *_ in KINDS),
        "groups": tuple(groups),
        "columns": tuple(columns),
        "links": links,
        "routes": routes,
        "objective": InstanceObjective.COST,
        "demand_per_s": 12.0,
        "spare_ratio": 0.1,
    }
    return InstancesProblem(**(given | changes))


def _random_column(rng: np.random.Generator, group: int, role: InstanceRole) -> Column:
    pool = group // len(InstanceRole)
    name, _, compute, bandwidth, price = KINDS[pool]
    size = int(rng.integers(1, LARGEST_INSTANCE + 1))
    prefill, decode = 1.2 * compute, 1.5 * bandwidth
    each = {
        InstanceRole.PREFILL: prefill,
        InstanceRole.DECODE: decode,
        InstanceRole.AGGREGATED: 0.8 / (1.0 / prefill + 1.0 / decode),
    }[role]
    return Column(
        name=f"{name} {role} x{size}",
        group=group,
        devices_P=tuple(size * (p == pool) for p in range(len(KINDS))),
        rate_per_s=float(each * size**SIZE_EXPONENT * rng.uniform(0.85, 1.15)),
        price_per_hour=price * size,
    )


def _links_and_routes(
    groups: list[ColumnGroup], *, disaggregated_pool: int
) -> tuple[tuple[TransferLink, ...], tuple[Route, ...]]:
    """A link between every two pools each way; the last group takes over in its own pool."""
    pairs = list(itertools.permutations(range(len(KINDS)), 2))
    links = tuple(
        TransferLink(name=f"{KINDS[a][0]} to {KINDS[b][0]}", bytes_per_s=LINK_BYTES_PER_S)
        for a, b in pairs
    )
    pool_of = [
        *(number // len(InstanceRole) for number in range(len(groups) - 1)),
        disaggregated_pool,
    ]
    routes = tuple(
        Route(
            sender=sender,
            receiver=receiver,
            request_bytes=REQUEST_BYTES,
            links=() if a == b else (pairs.index((a, b)),),
        )
        for (sender, a), (receiver, b) in itertools.product(enumerate(pool_of), enumerate(pool_of))
        if groups[sender].role is InstanceRole.PREFILL
        and groups[receiver].role is InstanceRole.DECODE
    )
    return links, routes
