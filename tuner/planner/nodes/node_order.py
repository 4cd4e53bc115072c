"""Put the nodes of a pool in the order in which the links that were measured hurt a plan least.

A step's price takes every link for the usual one, whose bandwidth is the network cards'. What the
measured matrix adds is how unlike the links are: it is scaled so that the median over nodes of each
node's best link is the cards' bandwidth, and

    slow links = max(0, T(matrix, order) - T(every link usual))
    T          = slowest pipeline + max(0, slowest sums - backward passes beside which sums run)

with both maxima those of solvers/rank_placement/problem.py. Where a scale-up domain spans nodes, or
nothing states the cards, the matrix is taken as it is. A matrix of one rank per node and one of all
cards therefore say the same.

Ours. The bound is the solver's less all that may hide. Letters: N nodes. Not covered: links that
get slower when others are busy.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from profilers.imports.link_matrix import LinkMatrix, read_link_matrix
from solvers.rank_placement import check
from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem
from solvers.registry import RANK_PLACEMENT
from tuner.errors import SpecError
from tuner.formulate.heterogeneous import card_bytes_per_s
from tuner.planner.nodes.traffic import Traffic
from tuner.spec.cluster import Cluster, Pool

MOST_PROVEN_NODES: Final = 6
"""The integer program closes the gap in seconds up to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordered:
    """An order of nodes and what slow links cost in it, seconds of a step."""

    nodes: tuple[str, ...]
    """In the order of ranks."""
    spare: tuple[str, ...]
    slow_before_s: float
    """As the matrix lists the nodes."""
    slow_s: float
    slow_bound_s: float
    """No order of these nodes loses less."""


def read_links(cluster: Cluster) -> dict[str, LinkMatrix]:
    """Read the matrices that the pools of a cluster name, by pool.

    Raises:
        UnknownNameError: a file of a folder does not say its collective.
        ProfileUnreadableError: a file or folder is no link matrix.
        SpecError: a matrix is of more or fewer nodes than its pool.
    """
    found = {}
    for pool in cluster.pools:
        if pool.link_matrix is None:
            continue
        matrix = read_link_matrix(pool.link_matrix)
        if len(matrix.nodes) != pool.nodes:
            raise SpecError(
                f"cluster.pools: the link_matrix of {pool.name!r} is of {len(matrix.nodes)} nodes, "
                f"the pool has {pool.nodes}; measure every pair, or say nodes: {len(matrix.nodes)}"
            )
        found[pool.name] = matrix
    return found


def order_nodes(
    sent: Traffic,
    links: LinkMatrix,
    *,
    pool: Pool,
    time_limit_s: float,
    known: Sequence[tuple[str, ...]] = (),
) -> Ordered:
    """Choose the nodes that run a plan's part on a pool, and their order.

    Args:
        sent: what they send.
        links: between all nodes of the pool.
        pool: of the spec.
        time_limit_s: for the search.
        known: orders that may be as good as what the search finds.

    Raises:
        SpecError: fewer nodes were measured than take part.
    """
    if len(links.nodes) < sent.num_nodes:
        raise SpecError(
            f"cluster.pools: the link_matrix of {pool.name!r} is of {len(links.nodes)} nodes, the "
            f"plan runs on {sent.num_nodes} of them; measure every pair"
        )
    rates_NN, usual = in_proportion(links, pool)
    problem = sent.problem(rates_NN)
    alike_s = _shown_s(sent.problem(np.full_like(rates_NN, usual)), _as_listed(sent), sent.hidden_s)
    method = "milp" if len(links.nodes) <= MOST_PROVEN_NODES else "annealing"
    outcome = RANK_PLACEMENT.solve(problem, method=method, time_limit_s=time_limit_s)
    tried = [_as_listed(sent), *(_placed(sent, links, nodes) for nodes in known)]
    if outcome.solution is not None:
        tried.append(outcome.solution)
    shown_s = [_shown_s(problem, placement, sent.hidden_s) for placement in tried]
    # The listed order stays where no other is faster.
    best = min(range(len(tried)), key=shown_s.__getitem__)
    chosen = tried[best].launch_order
    slow_s = max(0.0, shown_s[best] - alike_s)
    return Ordered(
        nodes=tuple(links.nodes[node] for node in chosen),
        spare=tuple(links.nodes[node] for node in range(len(links.nodes)) if node not in chosen),
        slow_before_s=max(0.0, shown_s[0] - alike_s),
        slow_s=slow_s,
        slow_bound_s=min(slow_s, max(0.0, outcome.bound - sent.hidden_s - alike_s)),
    )


def slow_in_order_s(
    sent: Traffic, links: LinkMatrix, nodes: tuple[str, ...], *, pool: Pool
) -> float:
    """Seconds of a step that slow links cost in a given order."""
    rates_NN, usual = in_proportion(links, pool)
    alike = sent.problem(np.full_like(rates_NN, usual))
    alike_s = _shown_s(alike, _as_listed(sent), sent.hidden_s)
    placement = _placed(sent, links, nodes)
    return max(0.0, _shown_s(sent.problem(rates_NN), placement, sent.hidden_s) - alike_s)


def in_proportion(links: LinkMatrix, pool: Pool) -> tuple[npt.NDArray[np.float64], float]:
    """The matrix at the level of the cards, and the usual link's bandwidth."""
    rates_NN = links.bytes_per_s_NN.copy()
    np.fill_diagonal(rates_NN, 0.0)
    usual = float(np.median(rates_NN.max(axis=1)))
    level = usual
    if pool.domain <= pool.devices_per_node and (pool.nic is not None or pool.device is not None):
        level = card_bytes_per_s(pool) * pool.devices_per_node
    return links.bytes_per_s_NN * (level / usual), level


def _as_listed(sent: Traffic) -> RankPlacement:
    return _in_order(sent, range(sent.num_nodes))


def _placed(sent: Traffic, links: LinkMatrix, nodes: tuple[str, ...]) -> RankPlacement:
    return _in_order(sent, [links.nodes.index(node) for node in nodes])


def _in_order(sent: Traffic, order: Sequence[int]) -> RankPlacement:
    """The placement whose launch order is the given one."""
    rows, groups = sent.nodes_of_stage, sent.groups
    return RankPlacement(
        node_RS=tuple(
            tuple(order[group * rows + row] for group in range(groups)) for row in range(rows)
        )
    )


def _shown_s(problem: RankPlacementProblem, placement: RankPlacement, hidden_s: float) -> float:
    """Seconds of a step that transfers between nodes take and nothing hides."""
    sums_s = max(check.gradient_s(problem, placement))
    return max(check.pipeline_s(problem, placement)) + max(0.0, sums_s - hidden_s)
