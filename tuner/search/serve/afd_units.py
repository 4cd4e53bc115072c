"""AFD units (attention-FFN disaggregation of decode): what every pair of sizes serves.

A unit is n_a attention devices and n_e expert devices, of one pool or of two with a link between
them. Memory bounds the requests B in flight, the target of the time per token bounds T(B), and

    x(n_a, n_e) = max over allowed B of B / (O T(B))      requests a second of a unit

By Little's law a unit keeps its target at a rate exactly where the rate is at most x, since T
grows more slowly than B: the batch at which it then runs is B = rate O T(B).

Source: Janus (arXiv:2512.13525), sizing by enumeration at the steady state of Little's law; T is
that of tuner/costs/serve/afd_step.py, the all-to-all that of tuner/costs/serve/two_phase.py.

Letters: N batches of a unit, M tokens that experts are priced at; O output tokens.
With recorded loads experts have copies and are counted by replicas.py; without any they
are distributed evenly, once each, under uniform routing.

Not covered: tensor-parallel attention; other AFD units on the same NICs.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.costs.serve.afd import steady_batch
from tuner.costs.serve.afd_step import (
    Activated,
    AttentionSeconds,
    activation_bytes,
    attention_cache_tokens,
    attention_seconds,
    expert_seconds,
    expert_slots,
    experts_of,
    least_expert_devices,
    step_seconds,
    uniform_activated,
)
from tuner.costs.serve.curves import Floats
from tuner.costs.serve.decoder import Decoder, Formats
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.expert_loads import ExpertLoads
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.two_phase import RoleDevices, Wire, two_phase_s
from tuner.search.serve.demand import MOST_RUNNING, Demand
from tuner.search.serve.options import ServingPool, most_running
from tuner.search.serve.replicas import ReplicaCounts
from tuner.spec.cluster import Cluster, Pool

CountsOf = Callable[[ServingPool], Activated]
"""How the experts that a device of a pool reads are counted."""

LARGEST_SIDE: Final = 64
"""Devices of one role in a unit."""
BATCHES: Final = 48
"""Requests of an attention device that are tried, evenly in their logarithm."""
EXPERT_BATCHES: Final = 96
"""Likewise tokens of a layer that experts are priced at; between them times are interpolated."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AfdUnit:
    """Attention devices with the expert devices that serve them."""

    attention: ServingPool
    experts: ServingPool
    attention_devices: int
    expert_devices: int
    batch_N: Floats
    """Requests in flight that memory allows."""
    tpot_s_N: Floats
    rate_per_s: float
    """Requests a second within the target of the time per token."""
    output_tokens: float
    """Of a mean request."""

    @property
    def devices(self) -> int:
        """Of both roles."""
        return self.attention_devices + self.expert_devices

    def tpot_s(self, batch: float) -> float:
        """Seconds per token with so many requests in flight."""
        return float(np.interp(batch, self.batch_N, self.tpot_s_N))

    def batch_at(self, rate_per_s: float) -> float:
        """Requests in flight at so many requests a second."""
        batch = steady_batch(
            tokens_per_s=rate_per_s * self.output_tokens,
            tpot_s=self.tpot_s,
            most=float(self.batch_N[-1]),
        )
        if batch is None:
            raise ValueError("a chosen AFD unit serves its share of the traffic")
        return batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _AttentionSide:
    """One attention device of a pool, priced over its requests."""

    serving_pool: ServingPool
    b_N: Floats
    seconds: AttentionSeconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _ExpertSide:
    """So many expert devices of a pool, priced over the tokens of a layer."""

    serving_pool: ServingPool
    devices: int
    tokens_M: Floats
    seconds_M: Floats


def everywhere_uniform(serving_pool: ServingPool) -> Activated:
    """Count under uniform routing, whatever the pool."""
    del serving_pool
    return uniform_activated


def cell_groups(
    serving_pools: Sequence[ServingPool],
    *,
    decoder: Decoder,
    formats: Formats,
    engine: str,
    demand: Demand,
    cluster: Cluster,
    activated: CountsOf = everywhere_uniform,
) -> Iterator[AfdUnit]:
    """Price every pair of sizes that memory allows and that keeps the target with one request."""
    activated_by_pool = {
        serving_pool.pool.name: activated(serving_pool) for serving_pool in serving_pools
    }
    of_experts = [
        _ExpertSide(
            serving_pool=serving_pool,
            devices=devices,
            tokens_M=tokens_M,
            seconds_M=expert_seconds(
                decoder,
                formats,
                tokens_M,
                devices=devices,
                machine=serving_pool.machine,
                engine=engine,
                activated=activated_by_pool[serving_pool.pool.name],
            ),
        )
        for tokens_M in [np.geomspace(1.0, float(LARGEST_SIDE * MOST_RUNNING), EXPERT_BATCHES)]
        for serving_pool in serving_pools
        for devices in _expert_sizes(serving_pool, decoder, formats)
    ]
    of_attention = list(_attention_sides(serving_pools, decoder, formats, engine, demand))
    for attention, experts in itertools.product(of_attention, of_experts):
        is_one = attention.serving_pool is experts.serving_pool
        wire = (
            None
            if is_one
            else wire_between(attention.serving_pool.pool, experts.serving_pool.pool, cluster)
        )
        if wire is None and not is_one:
            continue
        left = attention.serving_pool.pool.num_devices - (experts.devices if is_one else 0)
        for devices in range(1, min(left, LARGEST_SIDE) + 1):
            unit = _build_unit(
                attention, experts, devices, wire=wire, decoder=decoder, demand=demand
            )
            if unit is not None:
                yield unit


def counting(decoder: Decoder, formats: Formats, loads: ExpertLoads | None) -> CountsOf:
    """Return how the experts that a device of each pool reads are counted."""

    def of(serving_pool: ServingPool) -> Activated:
        slots = expert_slots(decoder, formats, memory_bytes=serving_pool.memory_bytes)
        return uniform_activated if loads is None else ReplicaCounts(loads=loads, slots=slots)

    return of


def _expert_sizes(serving_pool: ServingPool, decoder: Decoder, formats: Formats) -> range:
    least = least_expert_devices(decoder, formats, memory_bytes=serving_pool.memory_bytes)
    most = min(serving_pool.pool.num_devices, experts_of(decoder).num, LARGEST_SIDE)
    return range(0) if least is None else range(least, most + 1)


def _attention_sides(
    serving_pools: Sequence[ServingPool],
    decoder: Decoder,
    formats: Formats,
    engine: str,
    demand: Demand,
) -> Iterator[_AttentionSide]:
    for serving_pool in serving_pools:
        one = Iteration(
            decoder=decoder,
            formats=formats,
            degrees=InstanceDegrees(),
            engine=engine,
            machine=serving_pool.machine,
        )
        cache = attention_cache_tokens(one, memory_bytes=serving_pool.memory_bytes)
        if cache < demand.longest_input + demand.longest_output:
            continue
        b_N = np.geomspace(1.0, most_running(cache, demand, engine=engine), BATCHES)
        past = demand.input_tokens + 0.5 * demand.output_tokens
        yield _AttentionSide(
            serving_pool=serving_pool,
            b_N=b_N,
            seconds=attention_seconds(one, b_N, past_tokens=past),
        )


def _build_unit(
    attention: _AttentionSide,
    experts: _ExpertSide,
    devices: int,
    *,
    wire: Wire | None,
    decoder: Decoder,
    demand: Demand,
) -> AfdUnit | None:
    batch_N = devices * attention.b_N
    all_to_all_N = two_phase_s(
        batch_N,
        row_bytes=activation_bytes(decoder),
        attention=side_of(attention.serving_pool, devices),
        experts=side_of(experts.serving_pool, experts.devices),
        wire=wire,
    )
    experts_N = np.interp(np.log(batch_N), np.log(experts.tokens_M), experts.seconds_M)
    tpot_s_N = step_seconds(attention.seconds, experts_N, all_to_all_N, layers=decoder.moe_layers)
    batch = _most_allowed(batch_N, tpot_s_N, limit_s=demand.tpot_s)
    if batch is None:
        return None
    return AfdUnit(
        attention=attention.serving_pool,
        experts=experts.serving_pool,
        attention_devices=devices,
        expert_devices=experts.devices,
        batch_N=batch_N,
        tpot_s_N=tpot_s_N,
        rate_per_s=batch / (demand.output_tokens * float(np.interp(batch, batch_N, tpot_s_N))),
        output_tokens=demand.output_tokens,
    )


def _most_allowed(batch_N: Floats, tpot_s_N: Floats, *, limit_s: float) -> float | None:
    """Requests in flight at which the target is just kept; None where even the least miss it."""
    over = np.flatnonzero(tpot_s_N > limit_s)
    if not len(over):
        return float(batch_N[-1])
    first = int(over[0])
    if first == 0:
        return None
    pair = slice(first - 1, first + 1)
    return float(np.interp(limit_s, tpot_s_N[pair], batch_N[pair]))


def side_of(serving_pool: ServingPool, devices: int) -> RoleDevices:
    """Return so many devices of a pool with their links."""
    pool, sheet = serving_pool.pool, serving_pool.machine.sheet
    return RoleDevices(
        devices=devices,
        domain=pool.domain,
        inside_bytes_per_s=sheet.scale_up_bytes_per_s,
        nic_bytes_per_s=sheet.scale_out_bytes_per_s,
    )


def wire_between(one: Pool, other: Pool, cluster: Cluster) -> Wire | None:
    """Return the fastest link between two pools."""
    links_between = [link for link in cluster.links if set(link.between) == {one.name, other.name}]
    best = max(links_between, key=lambda link: link.bandwidth, default=None)
    return None if best is None else Wire(bytes_per_s=best.bandwidth, latency_s=best.latency)
