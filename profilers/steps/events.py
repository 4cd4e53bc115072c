"""What a rank does and when, as JSON lines for whoever supervises the job.

Every line holds `event`, `time_s` (seconds since 1970, of this host's clock) and `rank`, and:

    process_start       pid; its time is when the process began
    group_joined        every rank is connected
    model_built         weights and optimizer exist
    checkpoint_skipped  level, step, reason: it is not complete, or damaged
    restored            level, step, seconds; level none: begun at step 0
    step_done           step, seconds, loss: the mean of the global batch, before the update
    save_began          level, step
    training_resumed    level, step, stall_s: training waited for so long
    written             level, step: what this rank writes is on storage, under a temporary name
    durable             level, step, seconds since it began: the newest that a launch restores
    pruned              level, step: older ones than those kept are gone
    save_failed         level, step, reason: on all ranks; training goes on
    prune_failed        level, step, reason: the checkpoint is durable, older ones stay
    finished            step

A step counts the updates that are done: a checkpoint of step n holds the state after n of them.
"""

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import psutil


class Emit(Protocol):
    """Take note of an event of this rank."""

    def __call__(self, event: str, /, **fields: Any) -> None: ...


def ignore(_event: str, /, **_fields: Any) -> None:
    """Take no note."""


def file_of(path: Path, rank: int) -> Path:
    """Name the file of a rank after the one that was asked for: events.jsonl, events-3.jsonl."""
    return path.with_name(f"{path.stem}-{rank}{path.suffix}")


@contextmanager
def events_file(path: Path, rank: int) -> Iterator[Emit]:
    """Append a line for each event to the rank's own file, the first one for its process.

    Raises:
        OSError: the file cannot be opened.
    """
    lines = file_of(path, rank).open("a", encoding="utf-8", buffering=1)
    lock = threading.Lock()

    def emit(event: str, /, **fields: Any) -> None:
        line = {"event": event, "time_s": time.time(), "rank": rank} | fields
        # A disk that is full loses the line, not the step.
        with lock, suppress(OSError):
            lines.write(json.dumps(line) + "\n")

    emit("process_start", time_s=psutil.Process().create_time(), pid=os.getpid())
    try:
        yield emit
    finally:
        with suppress(OSError):
            lines.close()
