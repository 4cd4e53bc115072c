"""Seconds of a collective, and how each group of ranks maps to scale-up domains.

A group is its number of ranks and how many of them share one scale-up domain. Inside a domain a
ring runs at the domain's bandwidth. Across domains every rank of the group inside a domain uses its
own NIC (rails), so that

    bus bandwidth = min(scale-up, members inside one domain x network bandwidth per device)

With V bytes in all and n ranks: all-gather and reduce-scatter take (n - 1)/n V / bus, all-reduce
twice that (NVIDIA, nccl-tests, "Performance reported by NCCL tests"), each plus a fixed cost, one
hop per further rank of the domain and one far hop per doubling of the domains (tree). An all-to-all
sends a share (g - 1)/n inside the domain and (n - g)/n over the rank's own NIC, at the same time,
and to all ranks of the domain at once, without hops.

Ranks are numbered with the first dimension of the order innermost. Megatron-Core's default is
tp-cp-ep-dp-pp, from which it makes two grids (megatron/core/parallel_state.py, `RankGenerator`):
tp, cp, dp, pp for the dense layers and etp, ep, edp, pp for the experts.

Where a profile measured collectives, its ratios correct the formulas (collective_ratios.py).

Hybrid sharding (HSDP) keeps one copy of the state on some ranks, copies side by side: `shard_ranks`
of the ranks that share the dense parameters hold one copy, neighbours first, so that there are
data x context / shard_ranks copies. Experts have as many copies on their own ranks, each on
expert_data / copies of them: both Megatron-Core (`--num-distributed-optimizer-instances`,
megatron/core/parallel_state.py) and torchtitan (`data_parallel_replicate_degree`) put whole copies
of the model side by side. Gradients are reduce-scattered inside a copy, and then all-reduced over
the ranks that hold the same shard.

Letters: n ranks of a group, g of them inside one domain, V bytes.
Not covered: NCCL inside domains of more than 8 devices, where a ring's hops are extrapolated; rings
that cross an oversubscribed spine more than once, links that differ.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import Hardware
from tuner.prices.train.collective_ratios import MeasuredHardware
from tuner.prices.train.constants import Constants

MEGATRON_ORDER: Final = ("tp", "cp", "ep", "dp", "pp")
"""Order of ranks in Megatron, innermost first."""

ALL_TO_ALL_STARTS: Final = 2.0
"""An all-to-all's fixed cost over `collective_s`: 58, 41 and 51 us on 2, 4 and 8 B200 under NCCL,
where a ring has 23 us besides its hops (MooreThreads/SimuMax, v1.2,
configs/system/b200_bf16_ceperm)."""
MERGED: Final = "expert_all_to_all"
"""Name of DeepEP's and HybridEP's all-to-all in a profile's ratios."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Ranks that take part in one collective."""

    ranks: Numbers
    inside: Numbers
    """Ranks of the group inside one scale-up domain."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Every group that one rank belongs to."""

    tensor: Group
    context: Group
    data: Group
    shared: Group
    """Ranks that hold the same dense parameters: data and context parallel ones together."""
    expert: Group
    expert_tensor: Group
    expert_data: Group
    boundary: Group
    """Ranks of the pipeline's stages."""


def groups(
    strategies: Strategies, hardware: Hardware, *, order: tuple[str, ...] = MEGATRON_ORDER
) -> Groups:
    """Map the ranks to the machine in the given order, innermost dimension first.

    Raises:
        ValueError: the order is not a permutation of tp, cp, ep, dp, pp.
    """
    if sorted(order) != sorted(MEGATRON_ORDER):
        raise ValueError(
            f"order {'-'.join(order)!r} must name each of {', '.join(MEGATRON_ORDER)} once"
        )
    s = strategies
    dense_degrees = {"tp": s.tensor, "cp": s.context, "dp": s.data, "pp": s.pipeline}
    expert_degrees = {
        "tp": s.expert_tensor,
        "ep": s.expert,
        "dp": s.expert_data,
        "pp": s.pipeline,
    }
    dense = _placed_groups(dense_degrees, order, hardware.domain)
    expert = _placed_groups(expert_degrees, order, hardware.domain)
    return Groups(
        tensor=dense["tp"],
        context=dense["cp"],
        data=dense["dp"],
        shared=Group(ranks=s.data * s.context, inside=dense["dp"].inside * dense["cp"].inside),
        expert=expert["ep"],
        expert_tensor=expert["tp"],
        expert_data=expert["dp"],
        boundary=dense["pp"],
    )


def _placed_groups(
    degrees: dict[str, Numbers], order: tuple[str, ...], domain: Numbers
) -> dict[str, Group]:
    stride: Numbers = 1.0
    placed = {}
    for name in order:
        if name in degrees:
            ranks = degrees[name]
            inside = np.clip(np.floor(domain / stride), 1.0, ranks)
            placed[name] = Group(ranks=ranks, inside=inside)
            stride = stride * ranks
    return placed


def bus_bytes_per_s(group: Group, hardware: Hardware, constants: Constants) -> Numbers:
    """Bandwidth at which a ring over the group moves its bytes."""
    up = hardware.scale_up_bytes_per_s * constants.scale_up_ratio
    out = hardware.scale_out_bytes_per_s * constants.scale_out_ratio
    return np.where(group.inside >= group.ranks, up, np.minimum(up, group.inside * out))


def latency_s(group: Group, constants: Constants) -> Numbers:
    """Fixed cost of one collective of a ring's length; none for a group of one."""
    domains = np.maximum(group.ranks / group.inside, 1.0)
    hops = constants.hop_s * (group.inside - 1.0) + constants.far_hop_s * np.log2(domains)
    return np.where(group.ranks > 1.0, constants.collective_s + hops, 0.0)


def all_to_all_latency_s(group: Group, constants: Constants) -> Numbers:
    """Fixed cost of one all-to-all, which reaches all ranks of a domain at once."""
    started_s = ALL_TO_ALL_STARTS * constants.collective_s
    return latency_s(group, replace(constants, collective_s=started_s, hop_s=0.0))


def all_gather_s(
    total_bytes: Numbers, group: Group, hardware: Hardware, constants: Constants
) -> Numbers:
    """Every rank ends with all `total_bytes`; a reduce-scatter of as many bytes costs the same."""
    seconds = gathered_s(total_bytes, group, hardware, constants) + latency_s(group, constants)
    return _corrected_by_profile("all_gather", seconds, total_bytes, group, hardware)


def gathered_s(
    total_bytes: Numbers, group: Group, hardware: Hardware, constants: Constants
) -> Numbers:
    """Seconds in which the bytes of an all-gather pass, without what it starts with."""
    share = (group.ranks - 1.0) / group.ranks
    return share * total_bytes / bus_bytes_per_s(group, hardware, constants)


def sent_s(sent_bytes: Numbers, *, inside_ratio: float, hardware: Hardware) -> Numbers:
    """Seconds in which a rank sends bytes, a share of them inside its domain, one after another."""
    inside_s = inside_ratio * sent_bytes / hardware.scale_up_bytes_per_s
    return inside_s + (1.0 - inside_ratio) * sent_bytes / hardware.scale_out_bytes_per_s


def all_reduce_s(
    total_bytes: Numbers, group: Group, hardware: Hardware, constants: Constants
) -> Numbers:
    """Every rank contributes and ends with `total_bytes`."""
    share = 2.0 * (group.ranks - 1.0) / group.ranks
    moved = share * total_bytes / bus_bytes_per_s(group, hardware, constants)
    seconds = moved + latency_s(group, constants)
    return _corrected_by_profile("all_reduce", seconds, total_bytes, group, hardware)


def all_to_all_s(
    inside_bytes: Numbers,
    outside_bytes: Numbers,
    group: Group,
    hardware: Hardware,
    constants: Constants,
    *,
    is_merged: Numbers = 0.0,
) -> Numbers:
    """One rank sends so many bytes to others of its domain, and so many to other domains.

    A merged all-to-all (DeepEP, HybridEP) sends large messages between domains.
    """
    is_merged = np.greater(is_merged, 0.0)
    ratio = np.where(is_merged, constants.merged_all_to_all_ratio, constants.all_to_all_ratio)
    up = hardware.scale_up_bytes_per_s * constants.scale_up_ratio * ratio
    far = np.where(is_merged, 1.0, constants.far_all_to_all_ratio)
    out = hardware.scale_out_bytes_per_s * constants.scale_out_ratio * far
    moved = np.maximum(inside_bytes / up, outside_bytes / out)
    seconds = moved + all_to_all_latency_s(group, constants)
    if not isinstance(hardware, MeasuredHardware):
        return seconds
    sent = inside_bytes + outside_bytes
    # nccl-tests count what a rank keeps too.
    size = sent * group.ranks / np.maximum(group.ranks - 1.0, 1.0)
    plain = _corrected_by_profile("all_to_all", seconds, size, group, hardware)
    merged = _corrected_by_profile(MERGED, seconds, sent, group, hardware)
    return np.where(is_merged, merged, plain)


def send_s(sent_bytes: Numbers, group: Group, hardware: Hardware, constants: Constants) -> Numbers:
    """One rank sends to its neighbour; over the network if any neighbours of the group are."""
    up = hardware.scale_up_bytes_per_s * constants.scale_up_ratio
    out = hardware.scale_out_bytes_per_s * constants.scale_out_ratio
    bandwidth = np.where(group.inside >= group.ranks, up, out)
    seconds = np.where(group.ranks > 1.0, sent_bytes / bandwidth + constants.collective_s, 0.0)
    return _corrected_by_profile("send_recv", seconds, sent_bytes, group, hardware)


def _corrected_by_profile(
    kind: str, seconds: Numbers, size: Numbers, group: Group, hardware: Hardware
) -> Numbers:
    """Correct a formula by what was measured of such collectives, where anything was."""
    if not isinstance(hardware, MeasuredHardware):
        return seconds
    return hardware.collectives.corrected(
        kind, seconds, size=size, ranks=group.ranks, inside=group.inside
    )


def distinct_places(places: Numbers, experts: Numbers, top_k: Numbers) -> Numbers:
    """Expected number of places that hold at least one of a token's k experts, balanced routing.

    p (1 - C(E - E/p, k) / C(E, k)): the chance that none of k distinct experts is among the E/p of
    one place, as in HierMoE's duplication analysis (arXiv:2508.09591). With a mean of k that is not
    whole (experts without weights) tokens have the two whole numbers around it.
    """
    missed: Numbers = 1.0
    for chosen in range(int(np.ceil(np.max(top_k)))):
        left = np.maximum(experts - chosen, 1.0)
        miss = np.clip(1.0 - experts / np.maximum(places, 1.0) / left, 0.0, 1.0)
        part = np.clip(top_k - chosen, 0.0, 1.0)
        missed = np.where(part < 1.0, missed * (1.0 - part * (1.0 - miss)), missed * miss)
    return places * (1.0 - missed)


def num_copies(strategies: Strategies) -> Numbers:
    """Copies of the sharded state; 1 where it is sharded over all ranks."""
    s = strategies
    ranks = s.data * s.context
    parts = np.where(np.greater(s.shard_ranks, 0.0), np.minimum(s.shard_ranks, ranks), ranks)
    copies: Numbers = ranks / parts
    return copies


def of_one_copy(group: Group, copies: Numbers) -> Group:
    """Ranks of the group that share one copy."""
    ranks = np.maximum(group.ranks / copies, 1.0)
    return Group(ranks=ranks, inside=np.minimum(group.inside, ranks))


def between_copies(group: Group, copies: Numbers) -> Group:
    """Ranks of the group that hold the same shard, one of each copy."""
    ranks = np.maximum(group.ranks / copies, 1.0)
    return Group(ranks=copies, inside=np.maximum(np.minimum(group.inside / ranks, copies), 1.0))
