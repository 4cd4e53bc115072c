"""Measure on ranks of this host (profilers/local_ranks.py), and end all of them afterwards.

Each rank is `python -P -m profilers.worker`. Ranks report over one pipe, a JSON object a line with
the rank in it. A rank that dies or says that it failed ends the run, and so do all that still run
together by saying nothing for `SILENCE_S`; one that is silent beside others that talk is waited
for. The name and reason of the first failing rank are raised. Tables that were complete by then
stay. Should this process be killed outright, the workers notice that their parent changed and leave
(profilers/worker.py).
"""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from profilers.errors import NOBODYS_FAULT, RankError
from profilers.job import Job
from profilers.local_ranks import exit_code, has_ended, rendezvous_folder, started_ranks
from profilers.progress import Progress, ProgressEvent

SILENCE_S = 120.0
POLL_S = 0.2
GRACE_S = 2.0
"""Seconds for the other ranks to report, once one has failed."""


def run_workers(job: Job, *, ranks: int, progress: Progress, silence_s: float = SILENCE_S) -> None:
    """Run a job on ranks of this host and wait for it.

    Raises:
        RankError: a rank failed, died or fell silent.
        ProfilerError: what no rank is to blame for, as an unreadable profile to resume.
    """
    with rendezvous_folder() as scratch:
        (scratch / "job.json").write_text(job.model_dump_json(), encoding="utf-8")
        read_end, write_end = os.pipe()
        command = (sys.executable, "-P", "-m", "profilers.worker", str(scratch), f"{write_end}")
        try:
            with started_ranks(
                command,
                ranks=ranks,
                folder=scratch,
                errors=lambda rank: _output(scratch, rank),
                pipe=write_end,
            ) as processes:
                run = _Run(scratch=scratch, pipe=read_end, processes=processes)
                run.follow(progress=progress, silence_s=silence_s)
        finally:
            os.close(read_end)
            os.close(write_end)
        run.raise_failure()


@dataclass(slots=True, kw_only=True)
class _Run:
    """The ranks, and what they have said."""

    scratch: Path
    pipe: int
    processes: Sequence[subprocess.Popen[bytes]]
    heard_s: dict[int, float] = field(init=False)
    failures: dict[int, dict[str, Any]] = field(default_factory=dict)
    unread: bytes = b""

    def __post_init__(self) -> None:
        self.heard_s = dict.fromkeys(range(len(self.processes)), time.monotonic())

    def follow(self, *, progress: Progress, silence_s: float) -> None:
        """Pass on what the ranks say until all have ended, or one has failed.

        Raises:
            RankError: all that still run are silent.
        """
        failed_s: float | None = None
        while True:
            running = [
                rank for rank, process in enumerate(self.processes) if not has_ended(process)
            ]
            self._hear(progress, wait_s=POLL_S if running else 0.0)
            for rank in set(self.heard_s) - set(running) - set(self.failures):
                if exit_code(self.processes[rank]):
                    self.failures[rank] = _death(self.processes[rank], _output(self.scratch, rank))
            now_s = time.monotonic()
            if failed_s is None and self.failures:
                failed_s = now_s
            if not running or (failed_s is not None and now_s - failed_s > GRACE_S):
                return
            quietest = min(running, key=lambda rank: self.heard_s[rank])
            if now_s - max(self.heard_s[rank] for rank in running) > silence_s:
                raise RankError(
                    f"rank {quietest} made no progress for {silence_s:.0f} s and was killed; "
                    "complete tables are kept"
                )

    def raise_failure(self) -> None:
        """Raise what the first rank that failed says, if one has."""
        if not self.failures:
            return
        # Whoever merely lost a peer is not the one to blame.
        rank = min(
            self.failures,
            key=lambda failed_rank: (self.failures[failed_rank]["lost_peers"], failed_rank),
        )
        error = self.failures[rank]["error"]
        if kind := NOBODYS_FAULT.get(self.failures[rank]["kind"]):
            raise kind(error)
        raise RankError(f"rank {rank} failed: {error}; complete tables are kept")

    def _hear(self, progress: Progress, *, wait_s: float) -> None:
        for message in self._messages(wait_s):
            rank = int(message["rank"])
            self.heard_s[rank] = time.monotonic()
            if "error" in message:
                self.failures[rank] = message
            elif "event" in message:
                progress(ProgressEvent.model_validate(message["event"]))

    def _messages(self, wait_s: float) -> Iterator[dict[str, Any]]:
        """Read what has arrived; this process holds the pipe open, so that it never ends."""
        while select.select([self.pipe], [], [], wait_s)[0]:
            *whole, self.unread = (self.unread + os.read(self.pipe, 65536)).split(b"\n")
            yield from map(json.loads, whole)
            wait_s = 0.0


def _output(scratch: Path, rank: int) -> Path:
    return scratch / f"rank{rank}.err"


def _death(process: subprocess.Popen[bytes], output: Path) -> dict[str, Any]:
    code = process.returncode
    how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
    text = output.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    words = f"died with {how} ({lines[-1][:200] if lines else 'no message'})"
    return {"error": words, "kind": "", "lost_peers": False}
