"""Consecutive layers that each pipeline stage holds, and the pool of devices that runs the stage.

Pools are heterogeneous: each has its own layer times and memory. A pool runs up to a number of
stages, each on a group of its devices whose size is already in the times; its stages are
consecutive, because launchers number ranks pool by pool. Layers are any units in model order,
including the embedding and the head, and a stage holds at least one.

Objective (to be minimised): seconds that the pipeline takes for one optimizer step,

    step = sum_s C_s + 2 sum_c X_c + (m - 1) max(max_s C_s, max_c X_c)

with C_s the time of one micro-batch on stage s, forward and backward, and X_c the time that cut c
carries one micro-batch in one direction: the first micro-batch passes every stage and every cut in
both directions, the others follow at the pace of the slowest stage or link, whose two directions
are used at the same time. Source: the flush pipeline of Huang et al., GPipe, NeurIPS 2019
(arXiv:1811.06965), with different stages and links as Holmes (arXiv:2312.03549) and FusionLLM
(arXiv:2410.12707) have them; their own formulas are not published, this one is ours. Exact for a
schedule without interleaving whose sends overlap computing, and an estimate otherwise.

Memory of a stage: what stays, plus what is saved times the micro-batches in flight, which are as
many as stages follow it, itself included, and never more than m (one forward, one backward).

Letters: P pools, L layers, S stages. Not covered: gradient reduction (spread them over the layers'
times as a share of the step's micro-batches), interleaving, choices of recomputation.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.arrays import LARGEST_BYTES, freeze_bytes, freeze_numbers

Seconds = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionStage:
    """One stage of the chain."""

    pool: int
    """Index of the pool that runs it."""
    layers: int
    """Number of layers; they follow those of the stage before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """A solution: the stages in the order in which a micro-batch meets them."""

    stages: tuple[PartitionStage, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionProblem:
    """One instance; array arguments may be anything numpy can turn into an array."""

    pools: tuple[str, ...]
    """Names of the pools, for messages."""
    max_stages_P: tuple[int, ...]
    """Most stages that the devices of each pool suffice for."""
    time_s_PL: Seconds
    """Seconds of forward and backward of one layer for one micro-batch on a stage of the pool."""
    static_bytes_PL: Bytes
    """Resident bytes of a layer on each device of a stage of the pool."""
    saved_bytes_PL: Bytes
    """Bytes that a layer saves for the backward pass on each device, per micro-batch in flight."""
    memory_limit_bytes_P: Bytes
    """Memory of each device of the pool, bytes."""
    hop_s_PP: Seconds
    """Seconds that one micro-batch's activations take from a stage of one pool to the next stage in
    another, or in the same; `inf` where no link joins them."""
    num_microbatches: int

    def __post_init__(self) -> None:
        pools = len(self.pools)
        if not pools or len(set(self.pools)) != pools:
            raise ValueError(f"pools {self.pools} must be distinct names, at least one")
        if len(self.max_stages_P) != pools or min(self.max_stages_P) < 0:
            raise ValueError(f"max_stages_P {self.max_stages_P} must be a count for each pool")
        if self.num_microbatches < 1:
            raise ValueError(f"num_microbatches {self.num_microbatches} must be at least 1")
        time_s_PL = np.array(self.time_s_PL, dtype=np.float64)
        if time_s_PL.ndim != 2 or time_s_PL.shape[0] != pools or not time_s_PL.shape[1]:
            raise ValueError(f"time_s_PL is {time_s_PL.shape}, must be [{pools}, layers]")
        freeze_numbers(self, "time_s_PL", time_s_PL.shape)
        freeze_numbers(self, "hop_s_PP", (pools, pools), finite=False)
        flights = max(1, min(self.num_microbatches, self.max_stages))
        largest = LARGEST_BYTES // (self.num_layers * (flights + 1))
        freeze_bytes(self, "static_bytes_PL", time_s_PL.shape, largest=largest)
        freeze_bytes(self, "saved_bytes_PL", time_s_PL.shape, largest=largest)
        freeze_bytes(self, "memory_limit_bytes_P", (pools,), is_limit=True)

    @property
    def num_pools(self) -> int:
        """P."""
        return len(self.pools)

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.time_s_PL.shape[1])

    @property
    def max_stages(self) -> int:
        """The longest chain: all stages of all pools, or one layer each."""
        return min(sum(self.max_stages_P), self.num_layers)

    def in_flight(self, stages_behind: int) -> int:
        """Micro-batches that a stage holds when this many stages follow it."""
        return min(stages_behind + 1, self.num_microbatches)
