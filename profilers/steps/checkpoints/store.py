"""The checkpoints of a run on this rank: restore once, then save when it is due.

All ranks come to the same decisions: which steps are saved follows from their number, and whether a
save succeeded is agreed on before anything that was complete is removed. A save that fails, because
a disk is full, costs a line and nothing else.
"""

import sys
import threading
import time
from collections.abc import Callable

from profilers.errors import RankError
from profilers.steps.checkpoints.agreement import attempt, checkpoint_group
from profilers.steps.checkpoints.manifest import identity_of
from profilers.steps.checkpoints.pieces import (
    generator_pieces,
    note_generators,
    set_generators,
    training_pieces,
)
from profilers.steps.checkpoints.plan import StatePlan
from profilers.steps.checkpoints.shared import LEVEL, SharedLevel
from profilers.steps.checkpoints.snapshot import Snapshot
from profilers.steps.config import Checkpoints, StepConfig
from profilers.steps.events import Emit
from profilers.steps.layout import ParallelState
from profilers.steps.training import Training


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
        self._snapshot = Snapshot(pieces, is_pinned=layout.device.type == "cuda")
        self._shared = SharedLevel(
            checkpoints.shared,
            kept=checkpoints.kept,
            identity=identity_of(config),
            plan=StatePlan(pieces, self._group),
            group=self._group,
        )
        self._writer = _Background() if checkpoints.asynchronous else _Foreground()
        reason = attempt(self._shared.prepare, self._group)
        if reason is not None:
            raise RankError(f"checkpoints cannot be saved: {reason}")

    def restore(self) -> int:
        """Restore the newest checkpoint that all ranks can, and return its step; 0 without any.

        Raises:
            RankError: a checkpoint is another run's, or all on shared storage are damaged.
        """
        begin_s = time.perf_counter()
        steps, reason = self._shared.steps(), None
        for step in sorted(steps, reverse=True):
            reason = self._shared.restore(step, self._pieces, self._generators)
            if reason is None:
                set_generators(self._generators, self._layout)
                self._shared.resume(step)
                self._emit(
                    "restored", level=LEVEL, step=step, seconds=time.perf_counter() - begin_s
                )
                return step
            self._emit("checkpoint_skipped", level=LEVEL, step=step, reason=reason)
            self._say(f"checkpoint of step {step} is skipped: {reason}")
        if steps:
            raise RankError(
                f"none of {len(steps)} checkpoints can be restored ({reason}): move them away to"
                " begin at step 0"
            )
        self._emit("restored", level="none", step=0, seconds=time.perf_counter() - begin_s)
        return 0

    def save_if_due(self, step: int) -> None:
        """Save the state after so many updates, if the interval has passed."""
        if step % self._shared.interval_steps:
            return
        begin_s = time.perf_counter()
        self._emit("save_began", level=LEVEL, step=step)
        # The snapshot is written from until then.
        self._writer.wait()
        note_generators(self._generators, self._layout)
        self._snapshot.take()
        self._writer.start(lambda: self._save(step, begin_s))
        stall_s = time.perf_counter() - begin_s
        self._emit("training_resumed", level=LEVEL, step=step, stall_s=stall_s)

    def finish(self) -> None:
        """Wait until everything is written."""
        self._writer.wait()

    def _save(self, step: int, begin_s: float) -> None:
        reason = self._shared.save(step, self._snapshot, self._emit)
        if reason is not None:
            self._emit("save_failed", level=LEVEL, step=step, reason=reason)
            self._say(f"checkpoint of step {step} failed: {reason}")
            return
        self._emit("durable", level=LEVEL, step=step, seconds=time.perf_counter() - begin_s)
        reason = self._shared.prune()
        if reason is not None:
            self._emit("prune_failed", level=LEVEL, step=step, reason=reason)
            self._say(f"older checkpoints cannot be removed: {reason}")
            return
        self._emit("pruned", level=LEVEL, step=step)

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
