"""Placement of pipeline stages on nodes, on a cluster whose links differ.

R pipelines of S stages each need R S of N nodes; a node runs one stage of one pipeline, with its
tensor-parallel group and part of the data parallelism inside. A pipeline sends activations from
node to node; the nodes of the same stage all-reduce their gradients around a ring, in the order of
the pipelines. Nominally equal links differ in practice, so bandwidths are a measured matrix.
Nodes are identical otherwise: any runs any stage in the same time.

Objective (to be minimised): seconds of one optimizer step that links take,

    step = max_r [ sum_s X_bs + (m - 1) max_s X_bs + max(1, m / S) sum_s hop(r,s) ]
           + max_s [ G_s + H_s ],   b the block of pipeline r
    X_bs     = all_to_all_bytes[s] max over the block's nodes u of sum_v 1 / w(u, v), v its others
    hop(r,s) = hop_bytes (1 / w(u, v) + 1 / w(v, u)),   u and v the nodes of stages s and s + 1
    G_s      = 2 (R - 1) / R gradient_bytes[s] max over the ring's links (u, v) of 1 / w(u, v)
    H_s      = the same with block_gradient_bytes[s] and rings of R / B nodes, one of each block

A block is B consecutive pipelines: the expert all-to-all of a stage stays among its nodes, and
gradients that differ between the nodes of a block (those of the experts) are all-reduced over the
nodes at the same position of every block. Hops recur once for every S micro-batches, because no
more are in flight: each batch of S passes forward and back before the next starts. Source: Pipette,
DATE 2024 (arXiv:2405.18093), its latency model and its cost of a placement. Ours are: blocks, with
one message after the other, the upper end of what an all-to-all takes; every stage's ring is
priced, not the first alone; both directions of a link count; m / S is taken as it is rather than
rounded down; nodes may be more than are needed.

Letters: N nodes, R pipelines, S stages, B pipelines of a block. Not covered: two stages on one
node, interleaving, transfers that run beside others, nodes that differ in speed or memory.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.arrays import freeze, freeze_numbers

Rates = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlacement:
    """A solution: the node of every stage of every pipeline."""

    node_RS: tuple[tuple[int, ...], ...]

    @property
    def launch_order(self) -> tuple[int, ...]:
        """Nodes in the order of ranks: Megatron numbers tensor first, then data, then pipeline."""
        return tuple(node for stage in zip(*self.node_RS, strict=True) for node in stage)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankPlacementProblem:
    """One instance; array arguments may be anything numpy can turn into an array."""

    pipelines: int
    """R: data-parallel replicas that lie on nodes of their own."""
    stages: int
    """S."""
    num_microbatches: int
    """Micro-batches of one pipeline in a step."""
    bytes_per_s_NN: Rates
    """Bandwidth from the row's node to the column's, as measured; the diagonal is ignored."""
    hop_bytes: float
    """Bytes of one micro-batch from a stage to the next, over all links of a node together."""
    gradient_bytes_S: Rates
    """Bytes that a node all-reduces in its stage's ring, over all links of a node together."""
    block: int
    """B: pipelines whose nodes form an all-to-all group; a divisor of R, 1 where none crosses
    nodes."""
    all_to_all_bytes_S: Rates
    """Bytes that a node sends each other node of its block in one micro-batch."""
    block_gradient_bytes_S: Rates
    """Bytes that a node all-reduces with the nodes at its position in the other blocks."""

    def __post_init__(self) -> None:
        if min(self.pipelines, self.stages, self.num_microbatches) < 1:
            raise ValueError("pipelines, stages and num_microbatches must be at least 1")
        if self.block < 1 or self.pipelines % self.block:
            raise ValueError(f"blocks of {self.block} do not divide {self.pipelines} pipelines")
        rates_NN = np.array(self.bytes_per_s_NN, dtype=np.float64)
        nodes = len(rates_NN)
        if nodes < self.num_used_nodes:
            raise ValueError(
                f"{self.pipelines} pipelines of {self.stages} stages need "
                f"{self.num_used_nodes} nodes, "
                f"there are {nodes}"
            )
        if not 0.0 <= self.hop_bytes < np.inf:
            raise ValueError(f"hop_bytes {self.hop_bytes} must be at least 0")
        if rates_NN.shape != (nodes, nodes):
            raise ValueError(f"bytes_per_s_NN is {rates_NN.shape}, must be [{nodes}, {nodes}]")
        np.fill_diagonal(rates_NN, np.inf)
        if not (rates_NN > 0.0).all():
            raise ValueError("bytes_per_s_NN must be positive between every two nodes")
        freeze(self, "bytes_per_s_NN", rates_NN)
        for name in ("gradient_bytes_S", "all_to_all_bytes_S", "block_gradient_bytes_S"):
            freeze_numbers(self, name, (self.stages,))

    @property
    def num_nodes(self) -> int:
        """N."""
        return len(self.bytes_per_s_NN)

    @property
    def num_used_nodes(self) -> int:
        """Nodes that are needed."""
        return self.pipelines * self.stages

    @property
    def rounds(self) -> float:
        """Return how often a step pays the hops of a whole pipeline."""
        return max(1.0, self.num_microbatches / self.stages)
