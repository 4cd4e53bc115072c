"""Hierarchical dispatch: each hop sends a token once to a group that it needs.

Expert-parallel ranks form nested groups: U[1] of them on the slowest link (say, nodes), ... , and
U[D] = G ranks. With depth d the token crosses levels 1 .. d-1 one after the other, one copy per
group that it needs, and the last hop goes straight to the ranks inside the group:

    t_1 = alpha_plain + n(G) beta_plain
    t_d = sum_{i<d} (alpha_inter(i) + n(U[i]) beta_inter(i))
        + alpha_intra(d-1) + n(G) beta_intra(d-1)
    n(g) = tokens * M v * reached(g)       reached(g) = g * max_j P(token needs group j of g)

Source: HierMoE, arXiv 2508.09591, equations 1-7; its n_inter(i) = U[i]/U[i-1] max_j p[j] M v with
the p tokens that rest on a rank after the earlier hops comes to the above, since a token rests on
one rank of every group it needs. Combine mirrors dispatch and takes the same time (ours).

With balanced routing reached(g) is `distinct_places` of tuner/costs/train/collectives.py.

Which engines launch it: depth 2 with de-duplication is what the DeepEP and HybridEP dispatchers of
Megatron-Core do (they also overlap the two hops, which the analytic model prices); depths above 2,
and depth 2 over plain NCCL, no release of Megatron-LM, Megatron-Bridge, torchtitan or DeepSpeed
offers, so a plan states their gain but cannot choose them. The reference step runs depth 2, which
tuner/costs/reference/hierarchical_dispatch.py prices from measured collectives.

Letters: D depths, C columns. Not covered: swapping experts between groups (see placement), overlap
of a hop with the next or with the experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.config.columns import Numbers
from tuner.costs.train.collectives import ALL_TO_ALL_STARTS, Group
from tuner.costs.train.constants import Constants
from tuner.costs.train.shapes import Grid, Hardware


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Hop:
    """Start-up and slope of one kind of all-to-all; bytes are counted with a rank's own share."""

    latency_s: Numbers
    s_per_byte: Numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Levels:
    """A hierarchy of D levels; `groups`, `inter`, `intra` have D - 1 entries, outermost first."""

    groups: tuple[Numbers, ...]
    """U[1] .. U[D-1]: groups of the expert-parallel ranks at each level above single ranks."""
    ranks: Numbers
    """G."""
    plain: Hop
    """Straight between all ranks."""
    inter: tuple[Hop, ...]
    """Between the groups of level i, inside one of level i - 1."""
    intra: tuple[Hop, ...]
    """Between all ranks inside one group of level i."""

    def __post_init__(self) -> None:
        if not len(self.groups) == len(self.inter) == len(self.intra):
            raise ValueError(
                f"{len(self.groups)} levels of groups, but {len(self.inter)} inter and"
                f" {len(self.intra)} intra hops"
            )

    @property
    def places(self) -> tuple[Numbers, ...]:
        """U[1] .. U[D]."""
        return (*self.groups, self.ranks)


def dispatch_s(
    levels: Levels, *, reached: Sequence[Numbers], tokens: Numbers, row_bytes: Numbers
) -> Grid:
    """Seconds of one dispatch for depths 1 .. D, [D, C].

    `reached` has one entry per level, innermost last; a level with as many groups as the one above
    it is no hop and costs nothing.
    """
    sent = [tokens * row_bytes * places for places in reached]
    above: Sequence[Numbers] = (1.0, *levels.groups)
    inter = [
        _hop_s(hop, n_bytes=sent[i], peers=levels.groups[i] / above[i])
        for i, hop in enumerate(levels.inter)
    ]
    times = [_hop_s(levels.plain, n_bytes=sent[-1], peers=levels.ranks)]
    crossed: Numbers = 0.0
    for i, hop in enumerate(levels.intra):
        crossed = crossed + inter[i]
        peers = levels.ranks / levels.groups[i]
        times.append(crossed + _hop_s(hop, n_bytes=sent[-1], peers=peers))
    return np.stack(np.broadcast_arrays(*(np.atleast_1d(time) for time in times)))


def best_depth(time_DC: Grid) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the depth of least time and that time, per column; the smaller depth on ties."""
    depth_C = time_DC.argmin(axis=0)
    return depth_C + 1, np.take_along_axis(time_DC, depth_C[None], axis=0)[0]


def two_levels(group: Group, *, hardware: Hardware, constants: Constants) -> Levels:
    """Scale-up domains and the devices in them, with the analytic model's links.

    The own share of n(g) is not sent: 1 / peers of it. Straight between all ranks the slower of
    both links decides.
    """
    up = hardware.scale_up_bytes_per_s * constants.scale_up_ratio * constants.all_to_all_ratio
    out = (
        hardware.scale_out_bytes_per_s * constants.scale_out_ratio * constants.far_all_to_all_ratio
    )
    domains = group.ranks / group.inside
    far_s_per_byte = (domains - 1.0) / domains / out
    near_s_per_byte = (group.inside - 1.0) / group.ranks / up
    far_hops = constants.far_hop_s * np.log2(np.maximum(domains, 1.0))
    start = ALL_TO_ALL_STARTS * constants.collective_s
    inter = Hop(latency_s=start + far_hops, s_per_byte=far_s_per_byte)
    intra = Hop(latency_s=start, s_per_byte=(group.inside - 1.0) / group.inside / up)
    return Levels(
        groups=(domains,),
        ranks=group.ranks,
        plain=Hop(
            latency_s=start + far_hops,
            s_per_byte=np.maximum(far_s_per_byte, near_s_per_byte),
        ),
        inter=(inter,),
        intra=(intra,),
    )


def _hop_s(hop: Hop, *, n_bytes: Numbers, peers: Numbers) -> Numbers:
    """Zero without peers."""
    return np.where(peers > 1.0, hop.latency_s + n_bytes * hop.s_per_byte, 0.0)
