"""Both levels of a run's checkpoints on this rank: restore once, then save when it is due.

All ranks come to the same decisions: which steps are saved follows from their number, and whether a
save succeeded is agreed on before anything that was complete is removed. A save that fails, because
a disk is full, costs a line and nothing else.
"""

import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from profilers.errors import RankError
from profilers.steps.checkpoints.agreement import attempt, checkpoint_group
from profilers.steps.checkpoints.host import HostLevel, facts_of_rank
from profilers.steps.checkpoints.manifest import identity_of
from profilers.steps.checkpoints.pieces import (
    generator_pieces,
    note_generators,
    set_generators,
    training_pieces,
)
from profilers.steps.checkpoints.plan import StatePlan
from profilers.steps.checkpoints.shared import SharedLevel
from profilers.steps.checkpoints.snapshot import Snapshot
from profilers.steps.config import Checkpoints, StepConfig
from profilers.steps.events import Emit
from profilers.steps.layout import ParallelState
from profilers.steps.training import Training


class Level(Protocol):
    """Where checkpoints are saved."""

    name: str
    interval_steps: int

    def prepare(self) -> None: ...

    def save(self, step: int, snapshot: Snapshot, emit: Emit) -> str | None: ...

    def prune(self) -> str | None: ...


class _Candidate(NamedTuple):
    """A checkpoint that may be restored, in the order of preference."""

    step: int
    is_host: bool
    launch: str


class CheckpointStore:
    """The checkpoints of a run, as this rank sees them.

    Raises:
        RankError: a folder cannot be used; the same on all ranks.
    """

    def __init__(
        self,
        training: Training,
        config: StepConfig,
        checkpoints: Checkpoints,
        layout: ParallelState,
        emit: Emit,
    ) -> None:
        self._layout = layout
        self._emit = emit
        self._pieces = training_pieces(training, config, layout)
        self._generators = generator_pieces(layout)
        pieces = [*self._pieces, *self._generators]
        self._group = checkpoint_group()
        plan, identity = StatePlan(pieces, self._group), identity_of(config)
        facts = facts_of_rank(layout.rank, plan=plan, identity=identity)
        self._snapshot = Snapshot(pieces, facts=facts, is_pinned=layout.device.type == "cuda")
        self._shared = SharedLevel(
            checkpoints.shared,
            kept=checkpoints.kept,
            identity=identity,
            plan=plan,
            group=self._group,
        )
        self._host: HostLevel | None = None
        if checkpoints.host is not None:
            self._host = HostLevel(
                checkpoints.host,
                kept=checkpoints.kept,
                rank=layout.rank,
                ranks_per_node=layout.ranks_per_node,
                snapshot=self._snapshot,
                plan=plan,
                identity=identity,
                group=self._group,
            )
        self._writer = _Background() if checkpoints.asynchronous else _Foreground()
        for level in self._levels():
            reason = attempt(level.prepare, self._group)
            if reason is not None:
                raise RankError(f"checkpoints cannot be saved: {reason}")

    def restore(self) -> int:
        """Restore the newest checkpoint that all ranks can, and return its step; 0 without any.

        Raises:
            RankError: a checkpoint is another run's, or all on shared storage are damaged.
        """
        begin_s = time.perf_counter()
        sets = self._host.sets() if self._host else []
        candidates = [_Candidate(step, is_host=True, launch=launch) for step, launch in sets]
        steps = self._shared.steps()
        candidates += [_Candidate(step, is_host=False, launch="") for step in steps]
        reason = None
        for candidate in sorted(candidates, reverse=True):
            level, source, reason = self._restored(candidate)
            if reason is None:
                set_generators(self._generators, self._layout)
                self._shared.resume(candidate.step)
                seconds = time.perf_counter() - begin_s
                self._emit(
                    "restored", level=level, step=candidate.step, source=source, seconds=seconds
                )
                return candidate.step
            self._emit("checkpoint_skipped", level=level, step=candidate.step, reason=reason)
            self._say(f"checkpoint of step {candidate.step} ({level}) is skipped: {reason}")
        if steps:
            raise RankError(
                f"none of {len(steps)} checkpoints can be restored ({reason}): move them away to"
                " begin at step 0"
            )
        self._emit("restored", level="none", step=0, seconds=time.perf_counter() - begin_s)
        return 0

    def save_if_due(self, step: int) -> None:
        """Save the state after so many updates on the levels whose interval has passed."""
        # The upper level alone where both are due, as Megatron-LM does.
        due = [level for level in self._levels() if step % level.interval_steps == 0][-1:]
        if not due:
            return
        begin_s = time.perf_counter()
        for level in due:
            self._emit("save_began", level=level.name, step=step)
        # The snapshot is written from until then.
        self._writer.wait()
        note_generators(self._generators, self._layout)
        self._snapshot.take()
        self._writer.start(lambda: self._save(step, due, begin_s))
        stall_s = time.perf_counter() - begin_s
        for level in due:
            self._emit("training_resumed", level=level.name, step=step, stall_s=stall_s)

    def finish(self) -> None:
        """Wait until everything is written."""
        self._writer.wait()

    def _levels(self) -> list[Level]:
        return [self._shared] if self._host is None else [self._host, self._shared]

    def _restored(self, candidate: _Candidate) -> tuple[str, str, str | None]:
        """Try a checkpoint: its level, where this rank's state came from, and what went wrong."""
        if candidate.is_host and self._host is not None:
            reason = self._host.restore((candidate.step, candidate.launch))
            return self._host.name, self._host.source, reason
        reason = self._shared.restore(candidate.step, self._pieces, self._generators)
        return self._shared.name, self._shared.name, reason

    def _save(self, step: int, due: Sequence[Level], begin_s: float) -> None:
        for level in due:
            facts = {"level": level.name, "step": step}
            reason = level.save(step, self._snapshot, self._emit)
            if reason is not None:
                self._emit("save_failed", **facts, reason=reason)
                self._say(f"checkpoint of step {step} ({level.name}) failed: {reason}")
                continue
            self._emit("durable", **facts, seconds=time.perf_counter() - begin_s)
            reason = level.prune()
            if reason is not None:
                self._emit("prune_failed", **facts, reason=reason)
                self._say(f"older checkpoints ({level.name}) cannot be removed: {reason}")
                continue
            self._emit("pruned", **facts)

    def _say(self, line: str) -> None:
        if self._layout.rank == 0:
            print(f"profilers.steps: {line}", file=sys.stderr, flush=True)  # noqa: T201 - one line


class _Foreground:
    """Writes while training waits."""

    def start(self, action: Callable[[], None]) -> None:
        action()

    def wait(self) -> None:
        pass


class _Background:
    """Writes beside training, one save at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, action: Callable[[], None]) -> None:
        def run() -> None:
            try:
                action()
            except BaseException as error:  # raised again where training waits
                self._error = error

        # A daemon: a rank that failed must not wait for its peers while the interpreter shuts down.
        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
