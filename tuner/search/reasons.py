"""Why this plan: what binds it, why the others lost, how far an infeasible one is from feasible."""

import math
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from tuner.plans.breakdown import cause_words
from tuner.plans.train import Certificate, TrainPrediction
from tuner.search.change import Change
from tuner.spec.cluster import Pool
from tuner.spec.model import Moe
from tuner.units import format_bytes, format_ratio, format_s

MULTIPLES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Multiples of a pool's nodes, offered where nothing fits on them."""

MEMORY_LIMIT = "memory_per_device"
"""Name of the limit where everything legal needs more memory."""

HOST_LIMIT = "host_memory"
"""Name of the limit where everything that fits on the devices needs more of a node's memory."""

UNLIMITED_BYTES = 2**50
"""Bytes of more memory than any device has."""

WORTH_NAMING_RATIO = 1e-3
"""A limit that costs less than this share of the step time does not bind."""


def binding_constraint(
    predicted: TrainPrediction,
    *,
    fastest_s: float,
    unlimited_s: float | None,
    memory_limit_bytes: int,
) -> str:
    """Name what keeps the plan from being faster.

    Args:
        predicted: prediction for the plan's decision.
        fastest_s: step time of the fastest decision found.
        unlimited_s: the same if memory were unlimited, from another search.
        memory_limit_bytes: what one device may use.
    """
    if unlimited_s is not None and unlimited_s < fastest_s * (1.0 - WORTH_NAMING_RATIO):
        gain = format_ratio(1.0 - unlimited_s / fastest_s)
        return (
            f"memory_per_device: with unlimited memory the fastest step takes "
            f"{format_s(unlimited_s)}, {gain} less than the fastest found ({format_s(fastest_s)}); "
            f"{format_bytes(memory_limit_bytes)} of a device may be used"
        )
    cause, seconds = max(predicted.breakdown_s.items(), key=lambda item: item[1])
    share = format_ratio(seconds / predicted.step_time_s)
    return f"{cause_words(cause)}: {format_s(seconds)} ({share}) of the step; memory does not bind"


def what_is_not_known(certificate: Certificate, *, time_limit_s: float) -> str:
    """Say what a search without a result left open, and how to decide it; empty if nothing."""
    if not certificate.space.open:
        return ""
    return (
        f"whether anything fits is not known: {certificate.space.open} combinations were neither "
        f"solved nor ruled out (method {certificate.method}, time limit {format_s(time_limit_s)}); "
        "plan again with a longer --time-limit or fewer values under `search`"
    )


def unmeasured_links(
    *, measured_ranks: int, measured_nodes: int, devices: int, nodes: int
) -> Iterator[str]:
    """Say which links of so many devices a profile lacks, and how they are priced."""
    if measured_ranks < devices:
        yield (
            f"collectives were measured over {measured_ranks} ranks, the plan uses up to "
            f"{devices}: larger groups are extrapolated"
        )
    if measured_nodes < nodes:
        yield (
            f"the profile covers {measured_nodes} node{'s' * (measured_nodes > 1)}, the plan uses "
            f"up to {nodes}: links between nodes are priced like those inside one"
        )


def why_lost(chosen: TrainPrediction, runner_up: TrainPrediction) -> str:
    """Name the cause that makes a runner-up slower than the chosen decision."""
    slower_s = runner_up.step_time_s - chosen.step_time_s
    by_cause = {
        cause: runner_up.breakdown_s.get(cause, 0.0) - chosen.breakdown_s.get(cause, 0.0)
        for cause in sorted(runner_up.breakdown_s.keys() | chosen.breakdown_s.keys())
    }
    cause, extra_s = max(by_cause.items(), key=lambda item: item[1])
    if slower_s <= chosen.step_time_s * 1e-9:
        if slower_s >= -chosen.step_time_s * 1e-9:
            return "nothing: the model predicts the same time"
        ratio = format_ratio(-slower_s / chosen.step_time_s)
        return f"preference: the plan gives up {format_s(-slower_s)} ({ratio})"
    ratio = format_ratio(slower_s / chosen.step_time_s)
    more = f"{cause_words(cause)} takes {format_s(extra_s)} more"
    return f"{format_s(slower_s)} ({ratio}) slower; {more}"


def node_multiples(pool: Pool, *, used_nodes: int) -> Iterator[Change[Pool]]:
    """Yield larger and larger multiples of the nodes of a pool that a layout may use."""
    for multiple in MULTIPLES:
        nodes = multiple * used_nodes
        devices = nodes * pool.devices_per_node
        yield Change(
            limit="nodes",
            words=f"{nodes} nodes instead of {pool.nodes}: {devices} devices",
            apply=partial(_with_nodes, nodes=nodes),
        )


def _with_nodes(pool: Pool, nodes: int) -> Pool:
    return pool.model_copy(update={"nodes": nodes})


def nearest_value(legal: Iterable[int], requested: Collection[int]) -> int:
    """Return the legal value next to any of those requested, the smallest of equals."""
    return min(legal, key=lambda value: (min(abs(value - wanted) for wanted in requested), value))


def nearest_batch(batch: int, divisors: Iterable[int]) -> int:
    """Return the number of sequences next to `batch` that one of these numbers divides."""
    multiples = {
        multiple
        for divisor in divisors
        for multiple in (batch // divisor * divisor, -(-batch // divisor) * divisor)
        if multiple > 0
    }
    return min(multiples, key=lambda multiple: (abs(multiple - batch), multiple))


class MemoryOffer(NamedTuple):
    """Total memory of the devices of a pool, whatever share a plan may use."""

    needed_bytes: float
    has_bytes: float
    pool: str = ""
    """Name of the pool; empty where there is but one."""


def memory_words(offers: Iterable[MemoryOffer]) -> str:
    """Say what a device must have in total, rounded up, so that the printed size suffices."""
    return "; ".join(
        f"{format_bytes(printed_bytes(offer.needed_bytes))} per device"
        f"{f' of pool {offer.pool!r}' if offer.pool else ''} instead of "
        f"{format_bytes(int(offer.has_bytes))}"
        for offer in offers
    )


def printed_bytes(needed_bytes: float) -> int:
    """Return the least size of three digits in its unit that is not below a number of bytes."""
    unit = 1
    while needed_bytes >= 1024 * unit:
        unit *= 1024
    step = 10.0 ** (math.floor(math.log10(max(1.0, needed_bytes / unit))) - 2)
    return math.ceil(math.ceil(needed_bytes / unit / step - 1e-9) * step * unit)


def zero_experts_note(moe: Moe) -> str:
    """Say how many of a token's experts have weights, for the assumptions of a plan."""
    return (
        f"of the {moe.top_k} experts of a token {moe.computed_top_k:.3g} have weights on average:"
        f" routing is taken as uniform over {moe.num_experts} with and {moe.zero_experts} without"
    )
