"""Links between the ranks of a placement, and the cost of one token copy from rank to rank.

    G ranks   N nodes   row   bytes of a token copy, two an element: of what routed experts read,
                              or in a layer chain of the hidden state, which moves on
    n         token copies that a rank sends in one layer of a pass

Three sources; the first that covers a pair of ranks counts:

    profile       measured pairs of ranks: row / bandwidth + latency / n
    link matrix   the level below, its bandwidth term times the ratio of the usual link's bandwidth
                  to that between the two nodes
    level         an all-to-all of n rows inside a scale-up domain or between domains, over n
                  (tuner/costs/train/collectives.py): collectives of the profile where it has them,
                  else the datasheet, with `nic`, `nics_per_node` and `oversubscription` of the spec

Latency is shared by the copies that a rank sends at once. Without a model a row has no size: costs
are then relative to a copy inside a domain, and seconds are not stated. Without a cluster or a
known device they are 1 and 6: NVLink4 moves 450 GB/s per direction, eight 400 Gbit/s NICs give a
device 50, and half of the difference is lost to latency and message size in published all-to-alls
(MoETuner, arXiv 2502.06643, states 9 to 1 at its links; DeepEP's README 153 to 43 GB/s).

Of a matrix with more nodes than needed the first ones count, in its order. Not covered: contention
between links; another order of nodes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from profilers.imports.link_matrix import LinkMatrix
from profilers.links.matrix import MeasuredLink, links_of
from profilers.store import read_profile
from solvers.placement.ranks import Floats, Ints, Ranks
from tuner.costs.train.collective_ratios import MeasuredHardware
from tuner.costs.train.collectives import MERGED, Group, all_to_all_s
from tuner.costs.train.constants import Constants
from tuner.costs.train.shapes import Hardware, number
from tuner.plans.place import LinkFacts
from tuner.search.nodes.node_order import scaled_to_nics
from tuner.search.place.evidence import WorkloadEvidence, weight_W
from tuner.spec.cluster import Pool
from tuner.spec.model import ModelSpec
from tuner.spec.place import Objective, PlaceGoal
from tuner.spec.place_read import PlaceSpec

Allowed = npt.NDArray[np.bool_]

SAME_NODE_COST: Final = 1.0
OTHER_NODE_COST: Final = 6.0
"""Default where nothing else is known."""

ROW_ELEMENT_BYTES: Final = 2.0
"""Bytes of one element of a sent token."""

LARGE_BYTES: Final = 2.0**26
"""Size of a message whose latency is negligible."""

LEAST_RATIO: Final = 0.01
"""Minimum cost of a pair relative to its level's cost, however fast the matrix says it is."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkSource:
    """Sources of the link costs of a pool; all absent by default."""

    pool: Pool | None = None
    hardware: Hardware | None = None
    constants: Constants | None = None
    matrix: LinkMatrix | None = None
    pairs: tuple[MeasuredLink, ...] = ()
    """Links between ranks, measured by the pool's profile."""
    pairs_per_node: int = 1
    """Ranks per node of that profile."""


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


def measured_pairs(path: Path | None) -> tuple[tuple[MeasuredLink, ...], int]:
    """Return the measured links of a profile, none where it has none, and its ranks a node.

    Raises:
        ProfileUnreadableError: it is missing or damaged.
    """
    if path is None:
        return (), 1
    profile = read_profile(path, operations=("link",))
    return links_of(profile), max(profile.header.machine.ranks_per_node, 1)


def links_between(
    spec: PlaceSpec, evidence: Sequence[WorkloadEvidence], source: LinkSource
) -> LinkCosts:
    """Price the links between the ranks of a spec, for passes of the hold-out passes' size."""
    copies = [float(one.holdout_PLE.sum(axis=2).mean()) for one in evidence]
    mean = float(np.dot(weight_W(evidence), copies)) / spec.ranks.num_ranks
    return link_costs(
        source,
        goal=spec.goal,
        ranks=spec.ranks,
        row_bytes=None if spec.model is None else _row_bytes(spec.model, spec.goal),
        copies=max(mean, 1.0),
    )


def _row_bytes(model: ModelSpec, goal: PlaceGoal) -> float:
    is_chain = goal.objective is Objective.LAYER_CHAIN
    return ROW_ELEMENT_BYTES * (model.hidden_size if is_chain else model.expert_hidden)


def link_costs(
    source: LinkSource,
    *,
    goal: PlaceGoal,
    ranks: Ranks,
    row_bytes: float | None,
    copies: float,
) -> LinkCosts:
    """Price one token copy between every two ranks.

    Args:
        source: what is known.
        goal: whether tokens travel merged.
        ranks: with their nodes.
        row_bytes: of a token copy; None where no model is named.
        copies: that a rank sends in one layer of a pass.
    """
    domain_G = _domains(source.pool, ranks)
    slow_NN = _slow_NN(source, ranks.num_nodes)
    levels = _level_costs(source, domain_G, goal=goal, row_bytes=row_bytes, copies=copies)
    same_GG = domain_G[:, None] == domain_G
    near, far = levels.near, levels.far
    cost_GG = np.where(same_GG, near.whole, far.whole)
    moved_GG = np.where(same_GG, near.moving, far.moving)
    slow_GG = slow_NN[np.ix_(ranks.node_G, ranks.node_G)]
    cost_GG = np.maximum(cost_GG + moved_GG * (slow_GG - 1.0), LEAST_RATIO * cost_GG)
    inside, between = levels.near.name, levels.far.name
    if source.matrix is not None and source.pool is not None:
        spare = len(source.matrix.nodes) > ranks.num_nodes
        first = f" on its first {ranks.num_nodes} nodes" if spare else ""
        between = f"link_matrix of pool {source.pool.name!r}{first}, its usual link as by {between}"
    measured = _measured_GG(source, ranks, row_bytes=row_bytes, copies=copies)
    is_complete = not np.isnan(measured.cost_GG).any()
    if levels.is_priced or is_complete:
        is_known = ~np.isnan(measured.cost_GG)
        cost_GG = np.where(is_known, measured.cost_GG, cost_GG)
        inside = measured.inside or inside
        between = measured.between or between
    if source.pairs and not measured.between and ranks.num_nodes > 1:
        between += f" (the profile's measured links are not of {ranks.num_nodes} nodes)"
    has_seconds = row_bytes is not None and (levels.is_priced or is_complete)
    np.fill_diagonal(cost_GG, 0.0)
    unit = _usual(cost_GG, same_GG)
    relative_GG = cost_GG / unit
    return LinkCosts(
        cost_GG=relative_GG,
        unit_s=unit if has_seconds else None,
        domain_G=domain_G,
        slow_NN=_over_usual_NN(cost_GG, same_GG, ranks),
        facts=_facts(
            cost_GG if has_seconds else relative_GG,
            same_GG,
            is_relative=not has_seconds,
            inside=inside,
            between=between,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _CopyCost:
    """Cost of a copy, and the part of it that scales with the link's bandwidth."""

    whole: float
    moving: float
    name: str
    """Source of the cost, as messages name it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    near: _CopyCost
    far: _CopyCost
    is_priced: bool


def _level_costs(
    source: LinkSource,
    domain_G: Ints,
    *,
    goal: PlaceGoal,
    row_bytes: float | None,
    copies: float,
) -> _Levels:
    hardware, constants = source.hardware, source.constants
    if hardware is None or constants is None or source.pool is None:
        name = f"constants, {SAME_NODE_COST:g} to {OTHER_NODE_COST:g}"
        return _Levels(
            near=_CopyCost(whole=SAME_NODE_COST, moving=SAME_NODE_COST, name=name),
            far=_CopyCost(whole=OTHER_NODE_COST, moving=OTHER_NODE_COST, name=name),
            is_priced=False,
        )
    inside = float(np.bincount(domain_G).max())
    is_merged = float(goal.is_merged)
    row = row_bytes or 1.0
    many = LARGE_BYTES / row
    at_once = copies if row_bytes is not None else many

    def near(rows: float) -> float:
        group = Group(ranks=inside, inside=inside)
        sent = all_to_all_s(rows * row, 0.0, group, hardware, constants, is_merged=is_merged)
        return number(sent) / rows

    def far(rows: float) -> float:
        group = Group(ranks=float(len(domain_G)), inside=inside)
        sent = all_to_all_s(0.0, rows * row, group, hardware, constants, is_merged=is_merged)
        return number(sent) / rows

    return _Levels(
        near=_CopyCost(
            whole=near(at_once),
            moving=min(near(many), near(at_once)),
            name=_name_of_level(source.pool, hardware, is_between=False),
        ),
        far=_CopyCost(
            whole=far(at_once),
            moving=min(far(many), far(at_once)),
            name=_name_of_level(source.pool, hardware, is_between=True),
        ),
        is_priced=True,
    )


def _name_of_level(pool: Pool, hardware: Hardware, *, is_between: bool) -> str:
    if isinstance(hardware, MeasuredHardware):
        measured = (
            group
            for kind in ("all_to_all", MERGED)
            for group in hardware.collectives.groups.get(kind, ())
        )
        if any((group.inside < group.ranks) is is_between for group in measured):
            return "collectives of the profile"
    sheet = "the datasheet" if pool.device is None else f"the datasheet of {pool.device}"
    return f"{sheet} and nic of the spec" if is_between and pool.nic is not None else sheet


def _domains(pool: Pool | None, ranks: Ranks) -> Ints:
    """Number the scale-up domains of the ranks."""
    if pool is None:
        return np.asarray(ranks.node_G)
    first_G = np.searchsorted(ranks.node_G, ranks.node_G)
    place_G = ranks.node_G * pool.devices_per_node + np.arange(ranks.num_ranks) - first_G
    return np.asarray(np.unique(place_G // pool.domain, return_inverse=True)[1], dtype=np.int64)


def _slow_NN(source: LinkSource, num_nodes: int) -> Floats:
    if source.matrix is None or source.pool is None:
        return np.ones((num_nodes, num_nodes))
    rates_NN, usual = scaled_to_nics(source.matrix, source.pool)
    slow_NN = usual / rates_NN[:num_nodes, :num_nodes]
    np.fill_diagonal(slow_NN, 1.0)
    return np.asarray(slow_NN)


def _over_usual_NN(cost_GG: Floats, same_GG: Allowed, ranks: Ranks) -> Floats:
    far_GG = np.where(same_GG, 0.0, cost_GG)
    of_node_NG = (ranks.node_G == np.arange(ranks.num_nodes)[:, None]).astype(np.float64)
    pairs_NN = of_node_NG @ ~same_GG @ of_node_NG.T
    mean_NN = of_node_NG @ far_GG @ of_node_NG.T / np.maximum(pairs_NN, 1.0)
    usual = float(np.median(mean_NN[pairs_NN > 0.0])) if pairs_NN.any() else 1.0
    return np.where(pairs_NN > 0.0, mean_NN / usual, 1.0)


def slowdown_X(slow_NN: Floats, weight_XN: Floats) -> Floats:
    """Return the slowdown of an all-to-all between nodes, relative to uniform links.

    The slowest node sets its time, by what it sends or receives; all nodes send equally, to each
    node by its weight. Links faster than the median gain nothing.
    """
    between_NN = 1.0 - np.eye(len(slow_NN))

    def longest_X(cost_NN: Floats) -> Floats:
        sent_XN = weight_XN @ cost_NN.T
        got_XN = weight_XN * cost_NN.sum(axis=0)
        return np.asarray(np.maximum(sent_XN, got_XN).max(axis=-1))

    uniform_X = longest_X(between_NN)
    ratio_X = longest_X(slow_NN * between_NN) / np.where(uniform_X > 0.0, uniform_X, 1.0)
    return np.where(uniform_X > 0.0, np.maximum(ratio_X, 1.0), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Measured:
    cost_GG: Floats
    """NaN where no link was measured."""
    inside: str = ""
    between: str = ""


def _measured_GG(
    source: LinkSource, ranks: Ranks, *, row_bytes: float | None, copies: float
) -> _Measured:
    """Price the links that a profile measured, inside nodes or between them if all are known."""
    cost_GG = np.full((ranks.num_ranks, ranks.num_ranks), np.nan)
    np.fill_diagonal(cost_GG, 0.0)
    per_node = int(np.bincount(ranks.node_G).max())
    row = row_bytes or 1.0

    def cost(bytes_per_s: float, latency_s: float | None) -> float:
        shared_s = 0.0 if row_bytes is None else (latency_s or 0.0) / copies
        return row / bytes_per_s + shared_s

    inside, between = "", ""
    own = {(link.sender, link.receiver): link for link in source.pairs if link.is_inside}
    rank_of = _rank_numbers(ranks, source.pairs_per_node)
    kept = [
        (one, two, own.get((rank_of[one], rank_of[two])))
        for one, two in np.argwhere(ranks.node_G[:, None] == ranks.node_G).tolist()
        if one != two
    ]
    if kept and per_node <= source.pairs_per_node and all(link for _, _, link in kept):
        inside = "measured links of the profile"
        for one, two, link in kept:
            assert link is not None
            cost_GG[one, two] = cost(link.bytes_per_s, link.latency_s)
    rates = _rates_between(source.pairs, per_node)
    wanted = [(a, b) for a in range(ranks.num_nodes) for b in range(ranks.num_nodes) if a != b]
    if wanted and all(pair in rates for pair in wanted):
        between = "measured links of the profile"
        for one, two in wanted:
            at = np.ix_(ranks.node_G == one, ranks.node_G == two)
            cost_GG[at] = cost(*rates[one, two])
    return _Measured(cost_GG=cost_GG, inside=inside, between=between)


def _rank_numbers(ranks: Ranks, per_node: int) -> list[int]:
    """The rank of the profile that corresponds to each rank of the placement."""
    first_G = np.searchsorted(ranks.node_G, ranks.node_G)
    numbers: list[int] = (ranks.node_G * per_node + np.arange(ranks.num_ranks) - first_G).tolist()
    return numbers


def _rates_between(
    links: Sequence[MeasuredLink], per_node: int
) -> Mapping[tuple[int, int], tuple[float, float | None]]:
    """Bandwidth of one of `per_node` ranks between two nodes, all of them sending; and latency."""
    lanes: dict[tuple[int, int], dict[int, list[MeasuredLink]]] = {}
    for link in links:
        if not link.is_inside:
            nodes = link.sender_node, link.receiver_node
            lanes.setdefault(nodes, {}).setdefault(link.lanes, []).append(link)
    lane_rates = {}
    for nodes, by_lanes in lanes.items():
        all_lanes = by_lanes[max(by_lanes)]
        single_lane = by_lanes[min(by_lanes)][0]
        shared = sum(link.bytes_per_s for link in all_lanes) / per_node
        lane_rates[nodes] = min(shared, single_lane.bytes_per_s), single_lane.latency_s
    return lane_rates


def _usual(cost_GG: Floats, same_GG: Allowed) -> float:
    """The median cost inside a domain, of any pair where domains have one rank; 1 for one rank."""
    pair_costs = cost_GG[same_GG & (cost_GG > 0.0)]
    if not len(pair_costs):
        pair_costs = cost_GG[cost_GG > 0.0]
    return float(np.median(pair_costs)) if len(pair_costs) else 1.0


def _facts(
    cost_GG: Floats,
    same_GG: Allowed,
    *,
    is_relative: bool,
    inside: str,
    between: str,
) -> LinkFacts:
    near, far = cost_GG[same_GG & (cost_GG > 0.0)], cost_GG[~same_GG]
    slowest = divmod(int(cost_GG.argmax()), len(cost_GG))
    return LinkFacts(
        unit="relative" if is_relative else "seconds",
        inside_source=inside if len(near) else None,
        inside_cost=float(np.median(near)) if len(near) else None,
        between_source=between if len(far) else None,
        between_cost=float(np.median(far)) if len(far) else None,
        slowest_cost=float(cost_GG.max()),
        slowest_ranks=slowest,
    )
