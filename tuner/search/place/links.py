"""Links between the ranks of a placement, and the cost of one token copy from rank to rank.

    G ranks   N nodes   row   bytes of a token copy, two an element: of what routed experts read,
                              or in a layer chain of the hidden state, which moves on
    n         token copies that a rank sends in one layer of a pass

Three sources; the first that covers a pair of ranks counts:

    profile       measured pairs of ranks: row / bandwidth + latency / n
    link matrix   the level below, its bandwidth term times the ratio of the usual link's bandwidth
                  to that between the two nodes
    level         an all-to-all of n rows inside a scale-up domain or between domains, over n
                  (tuner/prices/train/collectives.py): collectives of the profile where it has them,
                  else the datasheet, with `nic`, `nics_per_node` and `oversubscription` of the spec

Latency is shared by the copies that a rank sends at once. Without a model a row has no size: costs
are then relative to a copy inside a domain, and seconds are not stated. Without a cluster or a
known device they are 1 and 6: NVLink4 moves 450 GB/s per direction, eight 400 Gbit/s NICs give a
device 50, and half of the difference is lost to latency and message size in published all-to-alls
(MoETuner, arXiv 2502.06643, states 9 to 1 at its links; DeepEP's README 153 to 43 GB/s).

Of a matrix with more nodes than needed the first ones count, in its order. Not covered: contention
between links; another order of nodes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from profilers.links.matrix import MeasuredLink
from solvers.placement.ranks import Floats, Ints, Ranks
from tuner.config.shapes import number
from tuner.plans.place import LinkFacts
from tuner.prices.peer_link import PeerLink
from tuner.prices.train.collective_ratios import MeasuredHardware
from tuner.prices.train.collectives import MERGED, Group, all_to_all_s
from tuner.search.nodes.node_order import scaled_to_nics
from tuner.search.place.evidence import WorkloadEvidence, weight_W
from tuner.search.place.prices import PlacePool
from tuner.spec.cluster import Pool
from tuner.spec.place import Objective, PlaceGoal
from tuner.spec.place_spec import PlaceSpec

Allowed = npt.NDArray[np.bool_]

LEVEL_COSTS: Final = np.array([1.0, 6.0])
"""Default inside a node and between nodes, where nothing else is known."""

ROW_ELEMENT_BYTES: Final = 2.0
"""Bytes of one element of a sent token."""

LARGE_BYTES: Final = 2.0**26
"""Size of a message whose latency is negligible."""

MEASURED: Final = "measured links of the profile"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkCosts:
    """Cost of one token copy, from rank to rank."""

    cost_GG: Floats
    """Cost between ranks relative to `unit_s`; zero on a rank."""
    unit_s: float | None
    """Seconds of a cost of 1; None: costs are relative only."""
    domain_G: Ints
    """Scale-up domain of each rank."""
    slow_NN: Floats
    """Cost between two nodes over that of the median pair; 1 where links are uniform."""
    facts: LinkFacts

    @property
    def scale(self) -> float:
        """Factor from costs to printed values."""
        return 1.0 if self.unit_s is None else self.unit_s


def links_between(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], source: PlacePool
) -> LinkCosts:
    """Price the links between the ranks of a spec, for passes of the hold-out passes' size."""
    ranks, pool, row_bytes = spec.ranks, source.pool, None
    if spec.model is not None:
        is_chain = spec.goal.objective is Objective.LAYER_CHAIN
        width = spec.model.hidden_size if is_chain else spec.model.expert_hidden
        row_bytes = ROW_ELEMENT_BYTES * width
    sent = [float(workload.holdout_PLE.sum(axis=2).mean()) for workload in evidence]
    copies = max(float(np.dot(weight_W(evidence), sent)) / ranks.num_ranks, 1.0)
    domain_G = _domains(pool, ranks)
    same_GG = domain_G[:, None] == domain_G
    whole, moved = _level_costs(source, domain_G, spec.goal, row_bytes=row_bytes, copies=copies)
    inside, between = (_level_name(source, is_between=far) for far in (False, True))
    cost_GG = np.where(same_GG, whole[0], whole[1])
    if source.matrix is not None and pool is not None:
        rates_NN, usual = scaled_to_nics(source.matrix, pool)
        np.fill_diagonal(rates_NN, usual)
        slow_GG = (usual / rates_NN)[np.ix_(ranks.node_G, ranks.node_G)]
        cost_GG = cost_GG + np.where(same_GG, moved[0], moved[1]) * (slow_GG - 1.0)
        between = f"link_matrix of pool {pool.name!r}, its usual link as by {between}"
    measured_GG = _measured_GG(source, ranks, row_bytes=row_bytes, copies=copies)
    is_known_GG = ~np.isnan(measured_GG)
    is_priced = source.hardware is not None or bool(is_known_GG.all())
    is_near_GG = ranks.node_G[:, None] == ranks.node_G
    knows_far = bool(is_known_GG[~is_near_GG].any())
    if is_priced:
        cost_GG = np.where(is_known_GG, measured_GG, cost_GG)
        # Beside the diagonal, all pairs of a node are known or none.
        inside = MEASURED if is_known_GG[is_near_GG].sum() > ranks.num_ranks else inside
        between = MEASURED if knows_far else between
    if source.pairs and ranks.num_nodes > 1 and not knows_far:
        between += f" (the profile's measured links are not of {ranks.num_nodes} nodes)"
    np.fill_diagonal(cost_GG, 0.0)
    has_seconds = row_bytes is not None and is_priced
    near, far = cost_GG[same_GG & (cost_GG > 0.0)], cost_GG[~same_GG]
    usual_pairs = near if len(near) else far
    unit = float(np.median(usual_pairs)) if len(usual_pairs) else 1.0
    stated = 1.0 if has_seconds else 1.0 / unit
    return LinkCosts(
        cost_GG=cost_GG / unit,
        unit_s=unit if has_seconds else None,
        domain_G=domain_G,
        slow_NN=_over_usual_NN(cost_GG, same_GG, ranks),
        facts=LinkFacts(
            unit="seconds" if has_seconds else "relative",
            inside_source=inside if len(near) else None,
            inside_cost=stated * float(np.median(near)) if len(near) else None,
            between_source=between if len(far) else None,
            between_cost=stated * float(np.median(far)) if len(far) else None,
            slowest_cost=stated * float(cost_GG.max()),
            slowest_ranks=divmod(int(cost_GG.argmax()), len(cost_GG)),
        ),
    )


def _level_costs(
    source: PlacePool,
    domain_G: Ints,
    goal: PlaceGoal,
    *,
    row_bytes: float | None,
    copies: float,
) -> tuple[Floats, Floats]:
    """Return the cost of a copy inside a domain and between domains, and its part in bandwidth."""
    hardware, constants = source.hardware, source.constants
    if hardware is None or constants is None:
        return LEVEL_COSTS, LEVEL_COSTS
    inside = float(np.bincount(domain_G).max())
    row = row_bytes or 1.0
    many = LARGE_BYTES / row

    def level_costs(rows: float) -> Floats:
        groups = [Group(ranks=ranks, inside=inside) for ranks in (inside, float(len(domain_G)))]
        sizes = (rows * row, 0.0), (0.0, rows * row)
        sent = [
            all_to_all_s(*size, group, hardware, constants, is_merged=float(goal.is_merged))
            for size, group in zip(sizes, groups, strict=True)
        ]
        return np.array([number(seconds) for seconds in sent]) / rows

    whole = level_costs(many if row_bytes is None else copies)
    return whole, np.minimum(level_costs(many), whole)


def _level_name(source: PlacePool, *, is_between: bool) -> str:
    """Name the source of a level's cost."""
    hardware, pool = source.hardware, source.pool
    if hardware is None or pool is None:
        return f"constants, {LEVEL_COSTS[0]:g} to {LEVEL_COSTS[1]:g}"
    known = hardware.collectives.groups if isinstance(hardware, MeasuredHardware) else {}
    measured = [group for kind in ("all_to_all", MERGED) for group in known.get(kind, ())]
    if any((group.inside < group.ranks) is is_between for group in measured):
        return "collectives of the profile"
    sheet = "the datasheet" if pool.device is None else f"the datasheet of {pool.device}"
    return f"{sheet} and nic of the spec" if is_between and pool.nic is not None else sheet


def _domains(pool: Pool | None, ranks: Ranks) -> Ints:
    """Number the scale-up domains of the ranks."""
    if pool is None:
        return np.asarray(ranks.node_G)
    place_G = _rank_numbers(ranks, pool.devices_per_node)
    return np.asarray(np.unique(place_G // pool.domain, return_inverse=True)[1], dtype=np.int64)


def _rank_numbers(ranks: Ranks, per_node: int) -> Ints:
    """Number the ranks where each node has so many."""
    first_G = np.searchsorted(ranks.node_G, ranks.node_G)
    return np.asarray(ranks.node_G * per_node + np.arange(ranks.num_ranks) - first_G)


def _over_usual_NN(cost_GG: Floats, same_GG: Allowed, ranks: Ranks) -> Floats:
    far_GG = np.where(same_GG, 0.0, cost_GG)
    of_node_NG = (ranks.node_G == np.arange(ranks.num_nodes)[:, None]).astype(np.float64)
    pairs_NN = of_node_NG @ ~same_GG @ of_node_NG.T
    mean_NN = of_node_NG @ far_GG @ of_node_NG.T / np.maximum(pairs_NN, 1.0)
    usual = float(np.median(mean_NN[pairs_NN > 0.0])) if pairs_NN.any() else 1.0
    return np.where(pairs_NN > 0.0, mean_NN / usual, 1.0)


def _measured_GG(
    source: PlacePool, ranks: Ranks, *, row_bytes: float | None, copies: float
) -> Floats:
    """Price the links that a profile measured, inside nodes or between them if all are known.

    NaN where no link was measured. Between nodes a rank has its share of what all lanes carry at
    once, and at most what one lane carries alone.
    """
    per_node = int(np.bincount(ranks.node_G).max())

    def cost(bytes_per_s: float, link: MeasuredLink) -> float:
        shared_s = 0.0 if row_bytes is None else (link.latency_s or 0.0) / copies
        sent = PeerLink(latency_s=shared_s, bytes_per_s=bytes_per_s)
        return float(sent.seconds(np.asarray(row_bytes or 1.0)))

    near: dict[tuple[int, int], float] = {}
    lanes: dict[tuple[int, int], list[MeasuredLink]] = {}
    for link in sorted(source.pairs, key=lambda link: link.lanes):
        if link.is_inside:
            near[link.sender, link.receiver] = cost(link.bytes_per_s, link)
        else:
            lanes.setdefault((link.sender_node, link.receiver_node), []).append(link)
    far = {}
    for nodes, links in lanes.items():
        together = sum(pair.bytes_per_s for pair in links if pair.lanes == links[-1].lanes)
        far[nodes] = cost(min(together / per_node, links[0].bytes_per_s), links[0])
    cost_GG = np.full((ranks.num_ranks, ranks.num_ranks), np.nan)
    number_G = _rank_numbers(ranks, source.pairs_per_node)
    is_near_GG = ranks.node_G[:, None] == ranks.node_G
    for known, at_G, is_of_GG in ((near, number_G, is_near_GG), (far, ranks.node_G, ~is_near_GG)):
        value_GG = np.array(
            [[known.get((sender, receiver), np.nan) for receiver in at_G] for sender in at_G]
        )
        np.fill_diagonal(value_GG, 0.0)
        is_covered = known is far or per_node <= source.pairs_per_node
        if is_covered and not np.isnan(value_GG[is_of_GG]).any():
            cost_GG[is_of_GG] = value_GG[is_of_GG]
    np.fill_diagonal(cost_GG, 0.0)
    return cost_GG
