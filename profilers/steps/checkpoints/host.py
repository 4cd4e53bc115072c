"""The level in the memory of nodes: every rank's snapshot as a file of its node, copied to others.

    /dev/shm/run/0/step-00000012-1f3a9c2e5b7d4f60/rank-00003.safetensors

Node n has ranks n * N and up. With R replicas each rank sends its snapshot to the rank at the same
place of the next R nodes, which keeps it beside its own: a node that is lost takes the states of
its ranks with it, and they get them back from there. Only the rank that a file is kept by reads it.

The name of a launch is part of a folder's, so that what a launch left of an abandoned step never
mixes with what the next one saves. A step is restored when every rank's file of the same launch is
on its own node or on another one. It needs the same split of the state (plan.py).

Not covered: a change of how many ranks a node has; the shared level is restored then.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from errno import EACCES, EPERM
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from profilers.errors import RankError
from profilers.steps.checkpoints.agreement import attempt, gather
from profilers.steps.checkpoints.folders import (
    PARTIAL,
    keep_only,
    remove_leftovers,
    step_folders,
    step_name,
)
from profilers.steps.checkpoints.manifest import RunIdentity
from profilers.steps.checkpoints.plan import StatePlan
from profilers.steps.checkpoints.snapshot import LENGTH_BYTES, Snapshot, read_header
from profilers.steps.config import HostCheckpoints
from profilers.steps.events import Emit

LEVEL: Final = "host"

StoredSet = tuple[int, str]
"""The step and the launch that saved it."""


class HostLevel:
    """Snapshots of all ranks, in the memory of their nodes.

    Args:
        config: the folder of each node, and how many copies.
        kept: how many finished checkpoints stay.
        rank: of the job.
        ranks_per_node: consecutive ranks that share a node.
        snapshot: of this rank, with the facts of `facts_of_rank`.
        plan: how the state is split.
        identity: of the run.
        group: all ranks, on the host's memory.

    Raises:
        RankError: there are too few nodes for the copies.
    """

    name = LEVEL

    def __init__(
        self,
        config: HostCheckpoints,
        *,
        kept: int,
        rank: int,
        ranks_per_node: int,
        snapshot: Snapshot,
        plan: StatePlan,
        identity: RunIdentity,
        group: dist.ProcessGroup,
    ) -> None:
        world = group.size()
        self.interval_steps = config.interval_steps
        self.source = "own"
        """Where the state that was restored came from: `own` memory, or a `peer`."""
        self._folder = Path(config.folder_of(rank // ranks_per_node))
        self._is_first_of_node = rank % ranks_per_node == 0
        self._kept = kept
        self._rank = rank
        self._snapshot = snapshot
        self._plan = plan
        self._identity = identity
        self._group = group
        self._keepers = [
            keepers(owner, world=world, ranks_per_node=ranks_per_node, replicas=config.replicas)
            for owner in range(world)
        ]
        self._sizes: list[int] = gather(snapshot.block.numel(), group)
        self._copies = {
            owner: torch.zeros(self._sizes[owner], dtype=torch.uint8)
            for owner in range(world)
            if rank in self._keepers[owner]
        }
        self._launch: str = gather(os.urandom(8).hex(), group)[0]
        self._holders: dict[StoredSet, dict[int, list[int]]] = {}
        self._finished: list[str] = []

    def prepare(self) -> None:
        """Make the folder of this node, and remove what killed launches left half-written in it.

        Raises:
            OSError: it cannot be written.
        """
        # Memory is a place where every user may make folders; this one is for nobody else.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._folder.stat().st_uid != os.getuid():
            raise PermissionError(EPERM, "belongs to another user", str(self._folder))
        if not self._is_first_of_node:
            return
        remove_leftovers(self._folder)
        for _, _, folder in step_folders(self._folder):
            for path in folder.glob(f"{PARTIAL}*"):
                path.unlink()
        if not os.access(self._folder, os.W_OK | os.X_OK):
            raise PermissionError(EACCES, os.strerror(EACCES), str(self._folder))

    def sets(self) -> list[StoredSet]:
        """List what every rank's state is kept of, somewhere, by step.

        Raises:
            RankError: a folder holds states of another run.
        """
        own: dict[str, Any] = {"rows": [], "foreign": None}
        for step, launch, owner, path in self._files():
            facts = _facts_in(path)
            if facts is None or not launch:
                continue
            difference = self._identity.difference_from(facts.get("identity"))
            if difference is not None:
                own["foreign"] = f"{path} is another run's: {difference}"
            elif facts == self._facts(step, launch, owner) | {"crc32": facts.get("crc32")}:
                own["rows"].append((step, launch, owner))
        ranks = gather(own, self._group)
        foreign = next((rank["foreign"] for rank in ranks if rank["foreign"]), None)
        if foreign is not None:
            raise RankError(f"{foreign}; name another folder for checkpoints")
        holders: dict[StoredSet, dict[int, list[int]]] = {}
        for holder, rank in enumerate(ranks):
            for step, launch, owner in rank["rows"]:
                holders.setdefault((step, launch), {}).setdefault(owner, []).append(holder)
        self._holders = {
            stored: by_owner
            for stored, by_owner in sorted(holders.items())
            if len(by_owner) == self._group.size()
        }
        return list(self._holders)

    def restore(self, stored: StoredSet) -> str | None:
        """Fill the pieces of the snapshot on all ranks, from peers where the own node has none.

        Returns:
            Why that is impossible, the same on all ranks; None: it is done.
        """
        reason = None
        while (sources := self._sources(stored)) is not None:
            damages = self._load(stored, sources)
            if not any(damages):
                self._snapshot.put_back()
                self.source = "own" if sources[self._rank] == self._rank else "peer"
                older = [step_name(*one) for one in self._holders if one[0] <= stored[0]]
                self._finished = older[-self._kept :]
                return None
            for owner, damage in enumerate(damages):
                if damage is not None:
                    reason = damage
                    self._holders[stored][owner].remove(sources[owner])
        return reason

    def save(self, step: int, snapshot: Snapshot, emit: Emit) -> str | None:
        """Keep the snapshot in memory, here and on other nodes.

        Returns:
            Why it failed, the same on all ranks; None: it is complete.
        """
        folder = self._folder / step_name(step, self._launch)
        snapshot.seal({"step": f"{step}", "launch": self._launch})
        self._send_copies(snapshot)
        blocks = {self._rank: snapshot.block, **self._copies}

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            for owner, block in blocks.items():
                _write(folder / (PARTIAL + file_name(owner)), block)
            emit("written", level=LEVEL, step=step)

        def complete() -> None:
            for owner in blocks:
                (folder / (PARTIAL + file_name(owner))).rename(folder / file_name(owner))

        reason = attempt(write, self._group) or attempt(complete, self._group)
        if reason is None:
            self._finished = [*self._finished, folder.name][-self._kept :]
            return None
        for owner in blocks:
            with suppress(OSError):
                (folder / (PARTIAL + file_name(owner))).unlink(missing_ok=True)
        return reason

    def prune(self) -> str | None:
        """Remove all but the newest finished checkpoints; say what was in the way."""
        return attempt(self._remove_older, self._group)

    def _remove_older(self) -> None:
        if self._is_first_of_node:
            keep_only(self._folder, self._finished)

    def _send_copies(self, snapshot: Snapshot) -> None:
        works = [
            dist.isend(snapshot.block, keeper, group=self._group)
            for keeper in self._keepers[self._rank]
        ]
        works += [
            dist.irecv(block, owner, group=self._group) for owner, block in self._copies.items()
        ]
        _wait(works)

    def _sources(self, stored: StoredSet) -> dict[int, int] | None:
        """Choose where each rank's state comes from; None where one is lost."""
        holders = self._holders[stored]
        if not all(holders.values()):
            return None
        return {
            owner: owner if owner in by_owner else by_owner[0]
            for owner, by_owner in sorted(holders.items())
        }

    def _load(self, stored: StoredSet, sources: Mapping[int, int]) -> list[str | None]:
        """Bring every rank's state into its snapshot, and say by rank what is wrong with it."""
        folder = self._folder / step_name(*stored)
        works = []
        for owner, source in sources.items():
            if source == self._rank:
                block = self._snapshot.block if owner == self._rank else self._copies[owner]
                _read(folder / file_name(owner), block)
                if owner != self._rank:
                    works.append(dist.isend(block, owner, group=self._group))
        if sources[self._rank] != self._rank:
            source = sources[self._rank]
            works.append(dist.irecv(self._snapshot.block, source, group=self._group))
        _wait(works)
        step, launch = stored
        damage = self._snapshot.damage(self._facts(step, launch, self._rank))
        if damage is not None:
            damage = f"{step_name(*stored)}, {file_name(self._rank)}: {damage}"
        return gather(damage, self._group)

    def _files(self) -> Iterator[tuple[int, str, int, Path]]:
        """List the files of this node that this rank answers for and that have the right size."""
        for step, launch, folder in step_folders(self._folder):
            for owner in (self._rank, *self._copies):
                path = folder / file_name(owner)
                if path.is_file():
                    yield step, launch, owner, path

    def _facts(self, step: int, launch: str, owner: int) -> dict[str, str]:
        constant = facts_of_rank(owner, plan=self._plan, identity=self._identity)
        return {**constant, "step": f"{step}", "launch": launch}


def facts_of_rank(rank: int, *, plan: StatePlan, identity: RunIdentity) -> dict[str, str]:
    """Return what every snapshot of a rank says about itself."""
    return {"rank": f"{rank}", "layout": plan.layout, "identity": identity.model_dump_json()}


def file_name(owner: int) -> str:
    """Name the file with the state of a rank."""
    return f"rank-{owner:05d}.safetensors"


def keepers(owner: int, *, world: int, ranks_per_node: int, replicas: int) -> list[int]:
    """List the ranks that keep copies of a rank's state: at its place of the next nodes.

    Where the last node has fewer ranks, places are counted around.

    Raises:
        RankError: there are too few nodes.
    """
    nodes = -(-world // ranks_per_node)
    if replicas >= nodes:
        raise RankError(
            f"replicas {replicas} need {replicas + 1} nodes, {world} ranks of {ranks_per_node} a"
            f" node are {nodes}"
        )
    node, place = divmod(owner, ranks_per_node)
    ranks = []
    for distance in range(1, replicas + 1):
        first = (node + distance) % nodes * ranks_per_node
        ranks.append(first + place % min(ranks_per_node, world - first))
    return ranks


def _facts_in(path: Path) -> dict[str, Any] | None:
    """Read what a file says about itself; None where it is damaged."""
    with suppress(OSError), path.open("rb") as file:
        start = file.read(LENGTH_BYTES)
        length = min(int.from_bytes(start, "little"), path.stat().st_size)
        header = read_header(start + file.read(length))
        return None if header is None else header["__metadata__"]
    return None


def _read(path: Path, block: Tensor) -> None:
    """Fill a block from a file; with zeros, which no checksum fits, where that is impossible."""
    view = block.numpy().data
    with suppress(OSError), path.open("rb") as file:
        if file.readinto(view) == len(view) and not file.read(1):
            return
    block.zero_()


def _write(path: Path, block: Tensor) -> None:
    with path.open("wb") as file:
        file.write(block.numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        if work is not None:
            work.wait()
