"""The team over torch.distributed: gloo between processors, NCCL between accelerators.

What the ranks send each other besides the timed messages (decisions, rows, times) goes through a
gloo group of its own, so that it never queues behind a collective on the device.
"""

import os
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]  # stub

from profilers.affinity import usable_cores
from profilers.errors import RankError
from profilers.links.groups import Shape, members
from profilers.links.master_address import wait_for_ranks
from profilers.ranks import RankInfo

T = TypeVar("T")

PATIENCE_S = 180.0
"""Seconds a rank waits for its peers; longer than its parent waits for a message from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """Node and cores of a rank."""

    name: str
    """Slurm's name of the node, else the host's."""
    node: int | None
    """Number of the node; None where the launcher does not count nodes."""
    host: str
    cores: frozenset[int]
    """Cores of the host that the rank may use; a launcher may bind each rank to a few."""

    @classmethod
    def local(cls, info: RankInfo) -> "Seat":
        """Return the seat of this process."""
        host = socket.gethostname()
        return cls(
            name=info.node_name or host,
            node=info.node,
            host=host,
            cores=usable_cores(),
        )


def cores_of(seats: Sequence[Seat]) -> int:
    """Cores that the ranks of the first rank's host may use together."""
    return len(frozenset().union(*(seat.cores for seat in seats if seat.host == seats[0].host)))


def share_cores(seats: Sequence[Seat]) -> bool:
    """Return whether some host has more ranks than cores for them, whatever nodes they count as."""
    cores: dict[str, frozenset[int]] = {}
    for seat in seats:
        cores[seat.host] = cores.get(seat.host, frozenset()) | seat.cores
    ranks = Counter(seat.host for seat in seats)
    return any(ranks[host] > len(its) for host, its in cores.items())


Place = tuple[str, int | None]
"""Name of a rank's node (Slurm's, else the host's), and its number; None where the launcher does
not count nodes."""


def ranks_per_node(places: Sequence[Place]) -> int:
    """Count the ranks of a node; they lie node by node, as many on each.

    Raises:
        RankError: they are not; groups of ranks would not lie where their shape says.
    """
    counts = Counter(places)
    if len(set(counts.values())) > 1:
        (largest, most_ranks), *_, (smallest, fewest_ranks) = counts.most_common()
        raise RankError(
            f"{largest[0]} runs {most_ranks} ranks and {smallest[0]} {fewest_ranks};"
            " start as many on every node"
        )
    per_node = len(places) // len(counts)
    for rank, place in enumerate(places):
        first = rank - rank % per_node
        if place != places[first]:
            raise RankError(
                f"rank {rank} runs on {place[0]} and rank {first} on {places[first][0]}; ranks of a"
                " node must follow each other (srun --distribution=block, mpirun --map-by slot)"
            )
    return per_node


class ConnectedTeam:
    """Ranks that reached each other; close it when done."""

    def __init__(self, info: RankInfo, *, device: torch.device, rendezvous: Path | None) -> None:
        self.rank = info.rank
        self.world = info.world
        store: TCPStore | FileStore
        if rendezvous is None:
            ranks = wait_for_ranks(info, patience_s=PATIENCE_S)
            store = ranks.store
            if ranks.nic:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", ranks.nic)
        else:
            store = FileStore(str(rendezvous), info.world)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            # A launcher keeps keys of its own in the store.
            store=PrefixStore("moetune", store),
            rank=info.rank,
            world_size=info.world,
            timeout=timedelta(seconds=PATIENCE_S),
        )
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
        self._groups: dict[Shape, dist.ProcessGroup] = {}
        seats: list[Seat | None] = [None] * info.world
        dist.all_gather_object(seats, Seat.local(info), group=self._control)
        self.seats = tuple(seat for seat in seats if seat is not None)
        """Seats of all ranks, by rank."""
        self.places: tuple[Place, ...] = tuple((seat.name, seat.node) for seat in self.seats)
        self.local_world = ranks_per_node(self.places)

    def barrier(self) -> None:
        dist.barrier(group=self._control)

    def decided(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def gathered(self, value: T) -> tuple[T, ...]:
        boxes: list[T | None] | None = [None] * self.world if self.rank == 0 else None
        dist.gather_object(value, boxes, dst=0, group=self._control)
        return tuple(box for box in boxes or () if box is not None)

    def slowest_s(self, times_s: Sequence[float]) -> tuple[float, ...]:
        times = torch.tensor(times_s, dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX, group=self._control)
        return tuple(times.tolist())

    def group(self, shape: Shape) -> dist.ProcessGroup:
        """This rank's group of a shape; made on first use, by all ranks together."""
        if shape not in self._groups:
            for ranks in members(shape, world=self.world):
                made = dist.new_group(list(ranks), timeout=timedelta(seconds=PATIENCE_S))
                if self.rank in ranks:
                    self._groups[shape] = made
        return self._groups[shape]

    def close(self) -> None:
        """Leave; the peers are not waited for."""
        dist.destroy_process_group()
