"""Order the nodes of a pool so that slow measured links cost a plan least.

A step's price assumes that every link is the usual one, with the bandwidth of the NICs. The
measured matrix adds the differences between links: it is scaled so that the median over nodes of
each node's best link is the NICs' bandwidth, and

    slow links = max(0, T(matrix, order) - T(every link usual))
    T          = slowest pipeline + max(0, slowest reduction - backward passes that overlap it)

with both maxima those of solvers/rank_placement/problem.py. Where a scale-up domain spans nodes, or
nothing states the NICs, the matrix is not scaled. A matrix of one rank per node and one of all NICs
therefore give the same result.

Our own model. The bound is the solver's less all that may overlap. Letters: N nodes. Not covered:
links that get slower when others are busy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from profilers.imports.link_matrix import LinkMatrix, read_link_matrix
from solvers.rank_placement import check
from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem
from solvers.registry import RANK_PLACEMENT
from tuner.costs.train.columns_of import nic_bytes_per_s
from tuner.errors import SpecError
from tuner.search.nodes.traffic import NodeTraffic
from tuner.spec.cluster import Cluster, Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderedNodes:
    """An order of nodes and the cost of slow links in it, seconds per step."""

    nodes: tuple[str, ...]
    """Nodes in the order of ranks."""
    spare: tuple[str, ...]
    slow_before_s: float
    """Seconds a step that slow links cost in the order in which the matrix lists the nodes."""
    slow_s: float
    slow_bound_s: float
    """Lower bound of `slow_s` over all orders of these nodes."""


def read_links(cluster: Cluster) -> dict[str, LinkMatrix]:
    """Read the matrices that the pools of a cluster name, by pool.

    Raises:
        UnknownNameError: a file of a folder does not say its collective.
        ProfileUnreadableError: a file or folder is no link matrix.
        SpecError: a matrix is of more or fewer nodes than its pool.
    """
    matrices = {}
    for pool in cluster.pools:
        if pool.link_matrix is None:
            continue
        matrix = read_link_matrix(pool.link_matrix)
        if len(matrix.nodes) != pool.nodes:
            raise SpecError(
                f"cluster.pools: the link_matrix of {pool.name!r} is of {len(matrix.nodes)} nodes, "
                f"the pool has {pool.nodes}; measure every pair, or say nodes: {len(matrix.nodes)}"
            )
        matrices[pool.name] = matrix
    return matrices


def order_nodes(
    sent: NodeTraffic,
    links: LinkMatrix,
    *,
    pool: Pool,
    time_limit_s: float,
    known: Sequence[tuple[str, ...]] = (),
) -> OrderedNodes:
    """Choose the nodes that run a plan's part on a pool, and their order.

    Args:
        sent: traffic between them.
        links: between all nodes of the pool.
        pool: of the spec.
        time_limit_s: of the search.
        known: further candidate orders.

    Raises:
        SpecError: fewer nodes were measured than take part.
    """
    if len(links.nodes) < sent.num_nodes:
        raise SpecError(
            f"cluster.pools: the link_matrix of {pool.name!r} is of {len(links.nodes)} nodes, the "
            f"plan runs on {sent.num_nodes} of them; measure every pair"
        )
    rates_NN, usual = scaled_to_nics(links, pool)
    problem = sent.problem(rates_NN)
    uniform_s = _exposed_s(
        sent.problem(np.full_like(rates_NN, usual)), _as_listed(sent), sent.hidden_s
    )
    outcome = RANK_PLACEMENT.solve(problem, time_limit_s=time_limit_s)
    tried = [_as_listed(sent), *(_placed(sent, links, nodes) for nodes in known)]
    if outcome.solution is not None:
        tried.append(outcome.solution)
    exposed_s = [_exposed_s(problem, placement, sent.hidden_s) for placement in tried]
    # Keep the listed order if no other is faster.
    best = min(range(len(tried)), key=exposed_s.__getitem__)
    chosen = tried[best].launch_order
    slow_s = max(0.0, exposed_s[best] - uniform_s)
    return OrderedNodes(
        nodes=tuple(links.nodes[node] for node in chosen),
        spare=tuple(links.nodes[node] for node in range(len(links.nodes)) if node not in chosen),
        slow_before_s=max(0.0, exposed_s[0] - uniform_s),
        slow_s=slow_s,
        slow_bound_s=min(slow_s, max(0.0, outcome.bound - sent.hidden_s - uniform_s)),
    )


def slow_links_s(
    sent: NodeTraffic, links: LinkMatrix, nodes: tuple[str, ...], *, pool: Pool
) -> float:
    """Seconds per step that slow links cost in a given order."""
    rates_NN, usual = scaled_to_nics(links, pool)
    uniform = sent.problem(np.full_like(rates_NN, usual))
    uniform_s = _exposed_s(uniform, _as_listed(sent), sent.hidden_s)
    placement = _placed(sent, links, nodes)
    return max(0.0, _exposed_s(sent.problem(rates_NN), placement, sent.hidden_s) - uniform_s)


def scaled_to_nics(links: LinkMatrix, pool: Pool) -> tuple[npt.NDArray[np.float64], float]:
    """The matrix scaled to the NICs, and the usual link's bandwidth."""
    rates_NN = links.bytes_per_s_NN.copy()
    np.fill_diagonal(rates_NN, 0.0)
    usual = float(np.median(rates_NN.max(axis=1)))
    level = usual
    if pool.domain <= pool.devices_per_node and (pool.nic is not None or pool.device is not None):
        level = nic_bytes_per_s(pool) * pool.devices_per_node
    return links.bytes_per_s_NN * (level / usual), level


def _as_listed(sent: NodeTraffic) -> RankPlacement:
    return _in_order(sent, range(sent.num_nodes))


def _placed(sent: NodeTraffic, links: LinkMatrix, nodes: tuple[str, ...]) -> RankPlacement:
    return _in_order(sent, [links.nodes.index(node) for node in nodes])


def _in_order(sent: NodeTraffic, order: Sequence[int]) -> RankPlacement:
    """The placement whose launch order is the given one."""
    rows, groups = sent.nodes_of_stage, sent.groups
    return RankPlacement(
        node_RS=tuple(
            tuple(order[group * rows + row] for group in range(groups)) for row in range(rows)
        )
    )


def _exposed_s(problem: RankPlacementProblem, placement: RankPlacement, hidden_s: float) -> float:
    """Exposed seconds per step of transfers between nodes."""
    sums_s = max(check.gradient_s(problem, placement))
    return max(check.pipeline_s(problem, placement)) + max(0.0, sums_s - hidden_s)
