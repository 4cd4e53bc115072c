"""Checkpoints on shared storage in PyTorch's distributed format, which any layout can read.

A folder `step-00000012` holds `.metadata`, one `.distcp` file of each rank, both as PyTorch's
`torch.distributed.checkpoint` writes and reads them, and `checkpoint.json` (manifest.py). Its
plans are made once (plan.py), so that a save needs three short gathers and no plan of PyTorch's.
"""

import os
import shutil
from collections.abc import Sequence
from errno import EACCES
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from pydantic import ValidationError
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from profilers.errors import CheckpointDamagedError, RankError, first_problem
from profilers.steps.checkpoints.agreement import attempt, describe, gather
from profilers.steps.checkpoints.distributed_format import METADATA, load_pieces, read_metadata
from profilers.steps.checkpoints.folders import (
    begin,
    complete,
    keep_only,
    partial_of,
    remove_leftovers,
    step_folders,
    step_name,
)
from profilers.steps.checkpoints.manifest import NAME, FileFacts, Manifest, RunIdentity, facts_of
from profilers.steps.checkpoints.pieces import Piece
from profilers.steps.checkpoints.plan import StatePlan
from profilers.steps.checkpoints.snapshot import Snapshot
from profilers.steps.config import SharedCheckpoints
from profilers.steps.events import Emit

LEVEL: Final = "shared"


class SharedLevel:
    """Checkpoints of all ranks in one folder.

    Args:
        config: the folder.
        kept: how many finished checkpoints stay.
        identity: of the run.
        plan: how its state is split.
        group: all ranks, on the host's memory.
    """

    def __init__(
        self,
        config: SharedCheckpoints,
        *,
        kept: int,
        identity: RunIdentity,
        plan: StatePlan,
        group: dist.ProcessGroup,
    ) -> None:
        self.interval_steps = config.interval_steps
        self._folder = Path(config.folder)
        self._kept = kept
        self._identity = identity
        self._plan = plan
        self._group = group
        self._is_first = group.rank() == 0
        self._finished: list[str] = []

    def prepare(self) -> None:
        """Make the folder, and remove what killed launches left in it.

        Raises:
            OSError: it cannot be written.
        """
        if self._is_first:
            self._folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._folder)
            if not os.access(self._folder, os.W_OK | os.X_OK):
                raise PermissionError(EACCES, os.strerror(EACCES), str(self._folder))

    def steps(self) -> list[int]:
        """List the steps that have a checkpoint, as the first rank sees them."""
        own = [step for step, _ in step_folders(self._folder)] if self._is_first else []
        steps: list[int] = gather(own, self._group)[0]
        return steps

    def restore(
        self, step: int, pieces: Sequence[Piece], generators: Sequence[Piece]
    ) -> str | None:
        """Load a checkpoint on all ranks, in whatever layout it was saved.

        Args:
            step: of the checkpoint.
            pieces: what to fill.
            generators: what to fill where the layout is the same.

        Returns:
            Why it cannot be loaded, the same on all ranks; None: it is.

        Raises:
            RankError: it is another run's.
        """
        folder = self._folder / step_name(step)
        manifest, reason = self._verified(folder, step)
        if manifest is None or reason is not None:
            return reason
        wanted = [*pieces, *(generators if manifest.layout == self._plan.layout else ())]
        return attempt(lambda: load_pieces(folder, wanted, files=manifest.files), self._group)

    def resume(self, step: int) -> None:
        """Count the checkpoints up to the step that was restored as finished."""
        folders = [folder.name for other, folder in step_folders(self._folder) if other <= step]
        self._finished = folders[-self._kept :]

    def save(self, step: int, snapshot: Snapshot, emit: Emit) -> str | None:
        """Write a checkpoint on all ranks and complete it.

        Returns:
            Why it failed, the same on all ranks; None: it is durable.
        """
        folder = self._folder / step_name(step)
        reason = attempt(lambda: self._begin(folder), self._group)
        if reason is not None:
            return reason
        own: dict[str, Any] = {"reason": None}
        try:
            own |= self._write(partial_of(folder), snapshot)
            emit("written", level=LEVEL, step=step)
        except (OSError, RuntimeError) as error:
            own["reason"] = describe(error)
        ranks = gather(own, self._group)
        reasons = [rank["reason"] for rank in ranks if rank["reason"] is not None]
        reason = reasons[0] if reasons else None
        if reason is None:
            reason = attempt(lambda: self._complete(folder, step, ranks), self._group)
        if reason is None:
            self._finished = [*self._finished, folder.name][-self._kept :]
        elif self._is_first:
            shutil.rmtree(partial_of(folder), ignore_errors=True)
        return reason

    def prune(self) -> str | None:
        """Remove all but the newest finished checkpoints; say what was in the way."""
        return attempt(self._remove_older, self._group)

    def _begin(self, folder: Path) -> None:
        if self._is_first:
            begin(folder)

    def _write(self, folder: Path, snapshot: Snapshot) -> dict[str, Any]:
        """Write this rank's file, and say where in it each piece lies."""
        writer = FileSystemWriter(folder)
        writer.set_up_storage_writer(self._is_first)
        local = writer.prepare_local_plan(SavePlan(self._plan.items()))
        own = writer.prepare_global_plan([local] * self._group.size())[self._group.rank()]
        results = writer.write_data(own, _SnapshotPlanner(snapshot)).wait()
        files = {result.storage_data.relative_path for result in results}
        return {
            "pieces": [
                (
                    result.index.fqn,
                    tuple(result.index.offset or ()),
                    result.storage_data.relative_path,
                    result.storage_data.offset,
                    result.storage_data.length,
                )
                for result in results
            ],
            "files": {name: facts_of(folder / name) for name in files},
        }

    def _complete(self, folder: Path, step: int, ranks: Sequence[dict[str, Any]]) -> None:
        """Describe what all ranks have written, and let readers take it."""
        if not self._is_first:
            return
        partial = partial_of(folder)
        results = [
            WriteResult(
                index=MetadataIndex(name, offsets),
                size_in_bytes=length,
                storage_data=_StorageInfo(file, start, length),
            )
            for rank in ranks
            for name, offsets, file, start, length in rank["pieces"]
        ]
        writer = FileSystemWriter(partial)
        writer.set_up_storage_writer(is_coordinator=True)
        writer.finish(self._plan.metadata(), [results])
        facts = {name: fact for rank in ranks for name, fact in rank["files"].items()}
        facts[METADATA] = facts_of(partial / METADATA)
        manifest = Manifest(
            step=step,
            identity=self._identity,
            layout=self._plan.layout,
            files={name: FileFacts(**fact) for name, fact in sorted(facts.items())},
        )
        with (partial / NAME).open("w", encoding="utf-8") as file:
            file.write(manifest.model_dump_json(indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        complete(folder)

    def _remove_older(self) -> None:
        if self._is_first:
            keep_only(self._folder, self._finished)

    def _verified(self, folder: Path, step: int) -> tuple[Manifest | None, str | None]:
        """Read the manifest and compare its files, each on one rank."""
        manifest, reason = self._read_manifest(folder, step)
        reasons = gather(reason, self._group)
        reason = next((one for one in reasons if one is not None), None)
        if manifest is None or reason is not None:
            return None, reason
        difference = self._identity.difference(manifest.identity)
        if difference is not None:
            raise RankError(
                f"{folder} is another run's: {difference}; name another folder for checkpoints"
            )
        return manifest, attempt(lambda: self._compare_files(folder, manifest), self._group)

    def _read_manifest(self, folder: Path, step: int) -> tuple[Manifest | None, str | None]:
        try:
            manifest = Manifest.model_validate_json((folder / NAME).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None, f"{folder / NAME} is missing"
        except ValidationError as error:
            return None, f"{folder / NAME}: {first_problem(error)}"
        except (OSError, UnicodeDecodeError) as error:
            return None, describe(error)
        if manifest.step != step:
            return None, f"{folder / NAME} is of step {manifest.step}"
        return manifest, None

    def _compare_files(self, folder: Path, manifest: Manifest) -> None:
        for number, (name, expected) in enumerate(sorted(manifest.files.items())):
            if number % self._group.size() != self._group.rank():
                continue
            if Path(name).name != name:
                raise CheckpointDamagedError(
                    f"{folder / NAME} names {name!r}, which is no file beside it"
                )
            facts = FileFacts(**facts_of(folder / name))
            if facts.bytes != expected.bytes:
                raise CheckpointDamagedError(
                    f"{folder / name} has {facts.bytes} of {expected.bytes} bytes"
                )
            if facts != expected:
                raise CheckpointDamagedError(
                    f"{folder / name} has another checksum than when it was written"
                )
        # On every rank, before anything is loaded on any of them.
        read_metadata(folder, files=manifest.files)


class _SnapshotPlanner(DefaultSavePlanner):
    """Gives PyTorch's writer the copies in a snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        super().__init__()
        self._snapshot = snapshot

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._snapshot.copies[index.fqn, tuple(index.offset or ())]
