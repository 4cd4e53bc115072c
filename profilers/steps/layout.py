"""Coordinates of ranks, process groups and the meshes of data parallelism.

Rank order is that of profilers/steps/config.py. Gradients are reduced in three scopes inside a
pipeline stage of D data and T tensor ranks with expert degree X:

    stage     D * T ranks       what tensor parallelism replicates: norms, router, embedding, head
    data      D ranks           what tensor parallelism splits: attention, dense and shared FFN
    replica   D * T / X ranks   experts, among the ranks with the same ones

Where the hierarchical dispatcher crosses nodes of N ranks, two more groups cut the expert group:

    across    X / N ranks       one of every node, those at the same place
    inside    N ranks           of one node

Not covered: nodes with different numbers of ranks.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from profilers.errors import RankError
from profilers.steps.config import Dispatcher, Parallelism

Ranks = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelState:
    """This rank's place in the job."""

    degrees: Parallelism
    rank: int
    ranks_per_node: int
    device: torch.device
    tensor_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup
    expert_group: dist.ProcessGroup
    across_group: dist.ProcessGroup | None
    """Group across nodes; absent, as `inside_group`, where dispatch is flat or stays inside a
    node."""
    inside_group: dist.ProcessGroup | None
    stage_mesh: DeviceMesh
    data_mesh: DeviceMesh
    replica_mesh: DeviceMesh

    @property
    def tensor_rank(self) -> int:
        """Place among the ranks that share a sequence."""
        return self.rank % self.degrees.tensor

    @property
    def data_rank(self) -> int:
        """Return the data-parallel rank: its part of the global batch."""
        return self.rank // self.degrees.tensor % self.degrees.data

    @property
    def pipeline_rank(self) -> int:
        """Return the pipeline rank: its stage."""
        return self.rank // (self.degrees.tensor * self.degrees.data)

    @property
    def expert_rank(self) -> int:
        """Return the expert-parallel rank: its block of the experts."""
        return self.rank % (self.degrees.tensor * self.degrees.data) % self.degrees.expert

    def is_far(self, group: dist.ProcessGroup) -> tuple[bool, ...]:
        """Return which ranks of a group are on other nodes than this one."""
        node = self.rank // self.ranks_per_node
        ranks = dist.get_process_group_ranks(group)
        return tuple(rank // self.ranks_per_node != node for rank in ranks)


def groups_of(degrees: Parallelism) -> dict[str, Ranks]:
    """List the ranks of every group by kind; each kind covers every rank exactly once."""
    tensor, data, expert = degrees.tensor, degrees.data, degrees.expert
    inside = tensor * data
    starts = range(0, degrees.world, inside)
    return {
        "solo": [[rank] for rank in range(degrees.world)],
        "tensor": [list(range(first, first + tensor)) for first in range(0, degrees.world, tensor)],
        "pipeline": [list(range(first, degrees.world, inside)) for first in range(inside)],
        "stage": [list(range(start, start + inside)) for start in starts],
        "data": [
            list(range(start + first, start + inside, tensor))
            for start in starts
            for first in range(tensor)
        ],
        "expert": [list(range(first, first + expert)) for first in range(0, degrees.world, expert)],
        "replica": [
            list(range(start + first, start + inside, expert))
            for start in starts
            for first in range(expert)
        ],
    }


def node_groups_of(degrees: Parallelism, *, ranks_per_node: int) -> dict[str, Ranks]:
    """List the groups of the hierarchical dispatcher; none where it has no nodes to cross."""
    expert = degrees.expert
    if degrees.dispatcher is Dispatcher.FLAT or expert <= ranks_per_node:
        return {}
    return {
        "across": [
            list(range(first + place, first + expert, ranks_per_node))
            for first in range(0, degrees.world, expert)
            for place in range(ranks_per_node)
        ],
        "inside": [
            list(range(first, first + ranks_per_node))
            for first in range(0, degrees.world, ranks_per_node)
        ],
    }


def join(degrees: Parallelism, *, device: torch.device, timeout: timedelta) -> ParallelState:
    """Create the groups of this rank; every rank of the job must call it, in the same order.

    Raises:
        RankError: the dispatcher cannot work on nodes of so many ranks.
    """
    started = int(os.environ.get("LOCAL_WORLD_SIZE", degrees.world))
    ranks_per_node = degrees.ranks_per_node or started
    if not degrees.spans_nodes_evenly(ranks_per_node):
        raise RankError(
            f"{ranks_per_node} ranks on a node neither divide the {degrees.expert} expert ranks"
            " nor are a multiple of them: use dispatcher flat"
        )
    created: dict[tuple[tuple[int, ...], ...], dist.ProcessGroup] = {}
    groups: dict[str, dist.ProcessGroup] = {}
    wanted = groups_of(degrees) | node_groups_of(degrees, ranks_per_node=ranks_per_node)
    for kind, ranks in wanted.items():
        key = tuple(tuple(group) for group in ranks)
        if key not in created:
            created[key], _ = dist.new_subgroups_by_enumeration(ranks, timeout=timeout)  # type: ignore[no-untyped-call]  # torch
        groups[kind] = created[key]

    def mesh(kind: str) -> DeviceMesh:
        """Replicated and not sharded for zero_stage 0, sharded otherwise."""
        if degrees.zero_stage:
            return DeviceMesh.from_group(groups[kind], device.type)
        ranks = dist.get_process_group_ranks(groups[kind])
        return DeviceMesh.from_group(
            [groups[kind], groups["solo"]],
            device.type,
            mesh=[[rank] for rank in ranks],
            mesh_dim_names=(kind, "solo"),
        )

    return ParallelState(
        degrees=degrees,
        rank=dist.get_rank(),
        ranks_per_node=ranks_per_node,
        device=device,
        tensor_group=groups["tensor"],
        pipeline_group=groups["pipeline"],
        expert_group=groups["expert"],
        across_group=groups.get("across"),
        inside_group=groups.get("inside"),
        stage_mesh=mesh("stage"),
        data_mesh=mesh("data"),
        replica_mesh=mesh("replica"),
    )
