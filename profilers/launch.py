"""Start ranks on this host and end all of them with the measurement.

Each rank is `python -P -m profilers.worker` in a session of its own, so that it can be killed with
everything it started. Ranks report over a pipe each, one JSON object a line. A rank that dies or
says that it failed ends the run, and so do all that still run together by saying nothing for
`SILENCE_S`; one that is silent beside others that talk is waited for. The name and reason of the
first failing rank are raised. Tables that were complete by then stay. Should this process be killed
outright, the workers notice that their parent changed and leave (profilers/worker.py).
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profilers.errors import NOBODYS_FAULT, RankError
from profilers.job import Job
from profilers.local_ranks import end_sessions, rendezvous_folder
from profilers.progress import Progress, ProgressEvent

SILENCE_S = 120.0
POLL_S = 0.2
GRACE_S = 2.0
"""For the other ranks to report, once one has failed."""


def run_workers(job: Job, *, ranks: int, progress: Progress, silence_s: float = SILENCE_S) -> None:
    """Run a job on ranks of this host and wait for it.

    Raises:
        RankError: a rank failed, died or fell silent.
        ProfilerError: what no rank is to blame for, as an unreadable profile to resume.
    """
    with rendezvous_folder() as scratch:
        job_file = scratch / "job.json"
        job_file.write_text(job.model_dump_json(), encoding="utf-8")
        with _started(scratch, ranks=ranks) as workers:
            _follow(workers, progress=progress, silence_s=silence_s)


@dataclass(slots=True, kw_only=True)
class _RankProcess:
    """One rank: its process, and what it has said."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: int
    errors: Path
    heard_s: float
    unread: bytes = b""
    ended: bool = False
    failure: dict[str, Any] = field(default_factory=dict)

    def lines(self) -> Iterator[dict[str, Any]]:
        """Read what has arrived; the end of the pipe is noted."""
        data = os.read(self.pipe, 65536)
        self.ended = not data
        self.heard_s = time.monotonic()
        *whole, self.unread = (self.unread + data).split(b"\n")
        for line in whole:
            yield json.loads(line)

    def last_words(self) -> str:
        """The last line of its error output."""
        text = self.errors.read_text(encoding="utf-8", errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:200] if lines else "no message"


@contextmanager
def _started(scratch: Path, *, ranks: int) -> Iterator[list[_RankProcess]]:
    workers: list[_RankProcess] = []
    try:
        # One by one: those that run must be known when starting the next one fails.
        for rank in range(ranks):
            workers.append(_start(scratch, rank=rank, ranks=ranks))  # noqa: PERF401  # see above
        yield workers
    finally:
        _end(workers)


def _start(scratch: Path, *, rank: int, ranks: int) -> _RankProcess:
    read_end, write_end = os.pipe()
    errors = scratch / f"rank{rank}.err"
    arguments = [str(scratch), f"{rank}", f"{ranks}", f"{write_end}", f"{os.getpid()}"]
    try:
        with errors.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "profilers.worker", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                pass_fds=(write_end,),
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
    except BaseException:
        os.close(read_end)
        raise
    finally:
        os.close(write_end)
    return _RankProcess(
        rank=rank, process=process, pipe=read_end, errors=errors, heard_s=time.monotonic()
    )


def _follow(workers: list[_RankProcess], *, progress: Progress, silence_s: float) -> None:
    """Pass on what the ranks say until all have ended well."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.pipe, selectors.EVENT_READ, worker)
        failed_s: float | None = None
        while selector.get_map():
            for ready, _ in selector.select(timeout=POLL_S):
                worker = ready.data
                _hear(worker, progress=progress)
                if worker.ended:
                    selector.unregister(worker.pipe)
                    if worker.process.wait() and not worker.failure:
                        worker.failure = _death(worker)
            now_s = time.monotonic()
            if failed_s is None and any(worker.failure for worker in workers):
                failed_s = now_s
            if failed_s is not None and now_s - failed_s > GRACE_S:
                break
            _require_talk(workers, now_s=now_s, silence_s=silence_s)
    failures = [worker.failure | {"rank": worker.rank} for worker in workers if worker.failure]
    if failures:
        # Whoever merely lost a peer is not the one to blame.
        first = min(failures, key=lambda failure: (failure["lost_peers"], failure["rank"]))
        if kind := NOBODYS_FAULT.get(first["kind"]):
            raise kind(first["error"])
        raise RankError(f"rank {first['rank']} failed: {first['error']}; complete tables are kept")


def _hear(worker: _RankProcess, *, progress: Progress) -> None:
    for message in worker.lines():
        if "error" in message:
            worker.failure = message
        elif message:
            progress(ProgressEvent.model_validate(message))


def _death(worker: _RankProcess) -> dict[str, Any]:
    code = worker.process.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    words = f"died with {how} ({worker.last_words()})"
    return {"error": words, "kind": "", "lost_peers": False}


def _require_talk(workers: list[_RankProcess], *, now_s: float, silence_s: float) -> None:
    running = [worker for worker in workers if not worker.ended]
    silent = [worker for worker in running if now_s - worker.heard_s > silence_s]
    if silent and len(silent) == len(running):
        quietest = min(silent, key=lambda worker: worker.heard_s)
        raise RankError(
            f"rank {quietest.rank} made no progress for {silence_s:.0f} s and was killed; "
            "complete tables are kept"
        )


def _end(workers: list[_RankProcess]) -> None:
    end_sessions([worker.process for worker in workers])
    for worker in workers:
        os.close(worker.pipe)
