"""AFD (attention-FFN disaggregation) where the release launches none: sized and priced.

    x = requests a second of a unit (tuner/search/serve/afd_units.py)
    k = ceil(rate (1 + spare) / x)                  units
    prefill: for each pool the instances of one kind on the fewest devices

Every pair of sizes (n_a, n_e) is tried, with every pool for prefill whose caches reach the
attention devices, and the least cost or the fewest devices count. Most releases launch no AFD,
so the result is a line under `unlaunchable`: what the mode would save against the chosen
plan, at the chosen plan's spare capacity. What vLLM's plugin launches is afd_options.py's.

Source: Janus (arXiv:2512.13525), which sizes decode; prefill is that of the disaggregated mode.

Not covered: queueing, beyond the spare capacity taken over; prefill on several kinds of instances;
units of several sizes side by side; units that share a machine's domain, which may leave devices
over.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.config.serve import Role
from tuner.costs.serve.afd_step import expert_slots
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.memory import kv_bytes_per_token, state_bytes_per_request
from tuner.search.serve.afd_units import AfdUnit, cell_groups, counting, side_of, wire_between
from tuner.search.serve.demand import Demand
from tuner.search.serve.options import Option, ServingPool
from tuner.search.serve.replicas import ReplicaCounts
from tuner.search.serve.solve_mode import ServeProblem
from tuner.spec.cluster import Cluster

FEATURE: Final = (
    "AFD (attention-FFN disaggregation): this release does not launch it, vllm"
    " 0.30.0+afd does as an experiment"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AfdDeployment:
    """AFD units and prefill instances that serve the traffic."""

    unit: AfdUnit
    num_units: int
    prefill: Option
    prefills: int
    tpot_s: float
    """At the steady state."""

    @property
    def ttft_s(self) -> float:
        """Of a single prompt."""
        return self.prefill.ttft_s

    @property
    def devices(self) -> int:
        """Of all of them."""
        return self.num_units * self.unit.devices + self.prefills * self.prefill.devices

    @property
    def price_per_hour(self) -> float:
        """Of all of them; pools without a price count nothing."""
        unit = self.unit
        attention = self.num_units * unit.attention_devices * _price(unit.attention)
        experts = self.num_units * unit.expert_devices * _price(unit.experts)
        return (
            attention
            + experts
            + self.prefills * self.prefill.devices * _price(self.prefill.serving_pool)
        )


def choose_sizes(
    afd_units: Sequence[AfdUnit],
    prefills: Sequence[Option],
    *,
    demand: Demand,
    cluster: Cluster,
    spare_ratio: float,
    by_price: bool,
) -> AfdDeployment | None:
    """Choose sizes and counts; None where no combination fits the pools.

    Args:
        afd_units: from `cell_groups`.
        prefills: prefill instance options.
        demand: the traffic.
        cluster: pools and links.
        spare_ratio: capacity above what the traffic needs, as a share of it.
        by_price: the least price, then the fewest devices; else the other way around.
    """
    rate = demand.rate_per_s * (1.0 + spare_ratio)
    feasible: list[tuple[tuple[float, float, float], AfdDeployment]] = []
    for option in _fewest(prefills, rate):
        for unit in afd_units:
            afd = AfdDeployment(
                unit=unit,
                num_units=math.ceil(rate / unit.rate_per_s),
                prefill=option,
                prefills=math.ceil(rate / option.rate_per_s),
                tpot_s=0.0,
            )
            if _fits(afd) and _reaches(afd, demand, cluster):
                price, devices = afd.price_per_hour, float(afd.devices)
                key = (price, devices) if by_price else (devices, price)
                feasible.append(((*key, -unit.rate_per_s * afd.num_units), afd))
    if not feasible:
        return None
    _, best = min(feasible, key=lambda pair: pair[0])
    return replace(best, tpot_s=_steady_tpot_s(best, demand))


def _fewest(prefills: Sequence[Option], rate: float) -> Iterator[Option]:
    """Of each pool the instances that serve the rate on the fewest devices."""
    for name in dict.fromkeys(option.serving_pool.pool.name for option in prefills):
        own = [option for option in prefills if option.serving_pool.pool.name == name]
        yield min(own, key=lambda one: math.ceil(rate / one.rate_per_s) * one.devices)


def _fits(afd: AfdDeployment) -> bool:
    unit, taken = afd.unit, dict[str, int]()
    for serving_pool, devices in (
        (unit.attention, afd.num_units * unit.attention_devices),
        (unit.experts, afd.num_units * unit.expert_devices),
        (afd.prefill.serving_pool, afd.prefills * afd.prefill.devices),
    ):
        taken[serving_pool.pool.name] = taken.get(serving_pool.pool.name, 0) + devices
        if taken[serving_pool.pool.name] > serving_pool.pool.num_devices:
            return False
    return True


def _reaches(afd: AfdDeployment, demand: Demand, cluster: Cluster) -> bool:
    """Whether caches of mean prompts get to the attention devices at the traffic's rate."""
    sender, receiver = afd.prefill.serving_pool, afd.unit.attention
    out = side_of(sender, afd.prefills * afd.prefill.devices)
    into = side_of(receiver, afd.num_units * afd.unit.attention_devices)
    rates = [side.devices * side.nic_bytes_per_s for side in (out, into)]
    if sender is not receiver:
        wire = wire_between(sender.pool, receiver.pool, cluster)
        rates.append(0.0 if wire is None else wire.bytes_per_s)
    own = afd.prefill.iteration
    whole = own.decoder, own.formats, InstanceDegrees()
    each = kv_bytes_per_token(*whole) * demand.input_tokens + state_bytes_per_request(
        *whole, states=own.traits.memory_rule().states.sent
    )
    return demand.rate_per_s * each <= min(rates)


def _steady_tpot_s(afd: AfdDeployment, demand: Demand) -> float:
    """Seconds per token of a unit at its share of the traffic."""
    unit = afd.unit
    return unit.tpot_s(unit.batch_at(demand.rate_per_s / afd.num_units))


def _price(serving_pool: ServingPool) -> float:
    return serving_pool.pool.price_per_device_hour or 0.0


def size_afd(problem: ServeProblem, *, spare_ratio: float) -> AfdDeployment | str:
    """Size AFD units for the traffic, or say why there are none."""
    spec, demand = problem.spec, problem.demand
    if problem.decoder.experts is None:
        return "the model has no experts"
    engine = spec.goal.engine.name
    afd_units = tuple(
        cell_groups(
            problem.serving_pools,
            decoder=problem.decoder,
            formats=problem.formats,
            engine=engine,
            demand=demand,
            cluster=spec.cluster,
            activated=counting(problem.decoder, problem.formats, problem.loads),
        )
    )
    if not afd_units:
        return "in no pool do attention and experts fit and meet the TPOT target"
    prefills = tuple(one for one in problem.options.options if one.role is Role.PREFILL)
    afd = choose_sizes(
        afd_units,
        prefills,
        demand=demand,
        cluster=spec.cluster,
        spare_ratio=spare_ratio,
        by_price=spec.goal.objective == "cost",
    )
    return afd or "the pools lack the devices or links for it at this traffic"


def describe_afd(afd: AfdDeployment | str, problem: ServeProblem, *, against: str) -> str:
    """Describe the deployment in a line.

    Args:
        afd: the deployment, or why there is none.
        problem: that was solved.
        against: what the chosen plan takes.
    """
    if isinstance(afd, str):
        return f"{FEATURE}; {afd}"
    text = f"{FEATURE}; {_describe_deployment(afd)}: {afd.devices} devices{against}"
    if problem.loads is None:
        return text
    return f"{text}; {_copies(afd, problem)}"


def _copies(afd: AfdDeployment, problem: ServeProblem) -> str:
    """Describe the copies of experts, by the recorded loads."""
    unit, experts = afd.unit, problem.decoder.experts
    if problem.loads is None or experts is None:
        raise ValueError("copies are counted where loads were recorded")
    slots = expert_slots(problem.decoder, problem.formats, memory_bytes=unit.experts.memory_bytes)
    counts = ReplicaCounts(loads=problem.loads, slots=slots)
    placed = counts.placement(unit.expert_devices).expert_LS
    most = max(int(np.bincount(row).max()) for row in placed)
    tokens = np.array([unit.batch_at(problem.demand.rate_per_s / afd.num_units)])
    read = float(counts(experts, tokens, unit.expert_devices)[0])
    return (
        f"by the recorded loads {placed.shape[1]} slots of a layer hold {experts.num} experts, up"
        f" to {most} copies of one, and the most-loaded device reads {read:.3g} experts at"
        f" {tokens[0]:.0f} tokens"
    )


def _describe_deployment(afd: AfdDeployment) -> str:
    unit = afd.unit
    times = f"{afd.num_units} AFD units, each of " if afd.num_units > 1 else ""
    return (
        f"{times}{unit.attention_devices} attention devices of {unit.attention.pool.name} and"
        f" {unit.expert_devices} expert devices of {unit.experts.pool.name} at"
        f" {afd.tpot_s * 1e3:.3g} ms a token, with"
        f" {afd.prefills * afd.prefill.devices} devices of {afd.prefill.serving_pool.pool.name} for"
        f" prefill, would serve this traffic"
    )
