"""Attention and experts of decode apart, where the release launches no cells: sized and priced.

    x = requests a second of a cell (tuner/planner/serve/afd_units.py)
    k = ceil(rate (1 + spare) / x)                  cells
    prefill: for each pool the instances of one kind on the fewest devices

Every pair of sizes (n_a, n_e) is tried, with every pool for prefill whose caches reach the
attention devices, and the least cost or the fewest devices count. Most releases launch no such
cells, so the answer is a line under `unlaunchable`: what the mode would save against the chosen
plan, at the chosen plan's spare capacity. What vLLM's plugin launches is afd_options.py's.

Source: Janus (arXiv:2512.13525), which sizes decode; prefill is that of the disaggregated mode.

Not covered: waiting, beyond the spare capacity taken over; prefill on several kinds of instances;
cells of several sizes side by side;
cells that share a machine's domain, which may leave devices over.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.costs.serving.afd_step import expert_slots
from tuner.costs.serving.engine import Degrees, Engine
from tuner.costs.serving.memory import kv_bytes_per_token
from tuner.planner.serve.afd_units import Cell, cells_of, counting, side_of, wire_between
from tuner.planner.serve.demand import Demand
from tuner.planner.serve.options import Option, PoolSite
from tuner.planner.serve.replicas import ReplicaCounts
from tuner.planner.serve.solve_mode import Question
from tuner.serve_plan import Role
from tuner.spec.cluster import Cluster

FEATURE: Final = (
    "attention and experts on devices of their own: this release does not launch it, vllm"
    " 0.30.0+afd does as an experiment"
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Apart:
    """Cells and prefill instances that serve the traffic."""

    cell: Cell
    cells: int
    prefill: Option
    prefills: int
    tpot_s: float
    """At the steady state."""

    @property
    def ttft_s(self) -> float:
        """Of a prompt alone."""
        return self.prefill.ttft_s

    @property
    def devices(self) -> int:
        """Of all of them."""
        return self.cells * self.cell.devices + self.prefills * self.prefill.devices

    @property
    def price_per_hour(self) -> float:
        """Of all of them; pools without a price count nothing."""
        cell = self.cell
        attention = self.cells * cell.attention_devices * _price(cell.attention)
        experts = self.cells * cell.expert_devices * _price(cell.experts)
        return (
            attention + experts + self.prefills * self.prefill.devices * _price(self.prefill.site)
        )


def sized(
    cells: Sequence[Cell],
    prefills: Sequence[Option],
    *,
    demand: Demand,
    cluster: Cluster,
    spare_ratio: float,
    by_price: bool,
) -> Apart | None:
    """Choose sizes and counts; None where no combination fits the pools.

    Args:
        cells: from `cells_of`.
        prefills: ways to run a prefill instance.
        demand: the traffic.
        cluster: pools and links.
        spare_ratio: capacity above what the traffic needs, as a share of it.
        by_price: the least price, then the fewest devices; else the other way around.
    """
    rate = demand.rate_per_s * (1.0 + spare_ratio)
    found: list[tuple[tuple[float, float, float], Apart]] = []
    for option in _fewest(prefills, rate):
        for cell in cells:
            apart = Apart(
                cell=cell,
                cells=math.ceil(rate / cell.rate_per_s),
                prefill=option,
                prefills=math.ceil(rate / option.rate_per_s),
                tpot_s=0.0,
            )
            if _fits(apart) and _reaches(apart, demand, cluster):
                price, devices = apart.price_per_hour, float(apart.devices)
                key = (price, devices) if by_price else (devices, price)
                found.append(((*key, -cell.rate_per_s * apart.cells), apart))
    if not found:
        return None
    _, best = min(found, key=lambda pair: pair[0])
    return replace(best, tpot_s=_steady_tpot_s(best, demand))


def _fewest(prefills: Sequence[Option], rate: float) -> Iterator[Option]:
    """Of each pool the instances that serve the rate on the fewest devices."""
    for name in dict.fromkeys(option.site.pool.name for option in prefills):
        own = [option for option in prefills if option.site.pool.name == name]
        yield min(own, key=lambda one: math.ceil(rate / one.rate_per_s) * one.devices)


def _fits(apart: Apart) -> bool:
    cell, taken = apart.cell, dict[str, int]()
    for site, devices in (
        (cell.attention, apart.cells * cell.attention_devices),
        (cell.experts, apart.cells * cell.expert_devices),
        (apart.prefill.site, apart.prefills * apart.prefill.devices),
    ):
        taken[site.pool.name] = taken.get(site.pool.name, 0) + devices
        if taken[site.pool.name] > site.pool.num_devices:
            return False
    return True


def _reaches(apart: Apart, demand: Demand, cluster: Cluster) -> bool:
    """Whether caches of mean prompts get to the attention devices at the traffic's rate."""
    sender, receiver = apart.prefill.site, apart.cell.attention
    out = side_of(sender, apart.prefills * apart.prefill.devices)
    into = side_of(receiver, apart.cells * apart.cell.attention_devices)
    rates = [side.devices * side.card_bytes_per_s for side in (out, into)]
    if sender is not receiver:
        wire = wire_between(sender.pool, receiver.pool, cluster)
        rates.append(0.0 if wire is None else wire.bytes_per_s)
    own = apart.prefill.iteration
    each = kv_bytes_per_token(own.decoder, own.formats, Degrees()) * demand.input_tokens
    return demand.rate_per_s * each <= min(rates)


def _steady_tpot_s(apart: Apart, demand: Demand) -> float:
    """Seconds per token of a cell at its share of the traffic."""
    cell = apart.cell
    return cell.tpot_s(cell.batch_at(demand.rate_per_s / apart.cells))


def _price(site: PoolSite) -> float:
    return site.pool.price_per_device_hour or 0.0


def apart_of(question: Question, *, spare_ratio: float) -> Apart | str:
    """Size cells for the traffic, or say why there are none."""
    spec, demand = question.spec, question.demand
    if question.decoder.experts is None:
        return "the model has no experts"
    engine = Engine(spec.goal.engine.name)
    cells = tuple(
        cells_of(
            question.sites,
            decoder=question.decoder,
            formats=question.formats,
            engine=engine,
            demand=demand,
            cluster=spec.cluster,
            activated=counting(question.decoder, question.formats, question.loads),
        )
    )
    if not cells:
        return "in no pool do its parts fit and keep the time per token"
    prefills = tuple(one for one in question.options.options if one.role is Role.PREFILL)
    apart = sized(
        cells,
        prefills,
        demand=demand,
        cluster=spec.cluster,
        spare_ratio=spare_ratio,
        by_price=spec.goal.objective == "cost",
    )
    return apart or "the pools lack the devices or links for it at this traffic"


def told_apart(apart: Apart | str, question: Question, *, against: str) -> str:
    """Say in a line what the mode comes to.

    Args:
        apart: cells, or why there are none.
        question: that was answered.
        against: what the chosen plan takes.
    """
    if isinstance(apart, str):
        return f"{FEATURE}; {apart}"
    told = f"{FEATURE}; {_told(apart)}: {apart.devices} devices{against}"
    if question.loads is None:
        return told
    return f"{told}; {_copies(apart, question)}"


def _copies(apart: Apart, question: Question) -> str:
    """Say in how many copies experts stand, by the recorded loads."""
    cell, experts = apart.cell, question.decoder.experts
    if question.loads is None or experts is None:
        raise ValueError("copies are counted where loads were recorded")
    slots = expert_slots(question.decoder, question.formats, memory_bytes=cell.experts.memory_bytes)
    counts = ReplicaCounts(loads=question.loads, slots=slots)
    placed = counts.placement(cell.expert_devices).expert_LS
    most = max(int(np.bincount(row).max()) for row in placed)
    tokens = np.array([cell.batch_at(question.demand.rate_per_s / apart.cells)])
    read = float(counts(experts, tokens, cell.expert_devices)[0])
    return (
        f"by the recorded loads {placed.shape[1]} slots of a layer hold {experts.num} experts, up"
        f" to {most} copies of one, and the busiest device reads {read:.3g} experts at"
        f" {tokens[0]:.0f} tokens"
    )


def _told(apart: Apart) -> str:
    cell = apart.cell
    times = f"{apart.cells} cells, each of " if apart.cells > 1 else ""
    return (
        f"{times}{cell.attention_devices} attention devices of {cell.attention.pool.name} and"
        f" {cell.expert_devices} expert devices of {cell.experts.pool.name} at"
        f" {apart.tpot_s * 1e3:.3g} ms a token, with"
        f" {apart.prefills * apart.prefill.devices} devices of {apart.prefill.site.pool.name} for"
        f" prefill, would serve this traffic"
    )
