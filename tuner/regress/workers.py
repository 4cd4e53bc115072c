"""Runs planning in processes of its own: bounded in time and memory, and gone when we are.

One `Planner` holds one process of tuner/regress/worker.py, which forks for every job. A job that
crashes costs its own answer; one that is still running when its time is over is killed with the
whole group of processes, and the next job starts a fresh one.

    Tree     which moetune plans: the folder that holds the packages tuner, solvers, profilers
    Job      what to plan
    Answer   the plan with its effort, or why there is none

Not covered: another machine. Threads ask; each has a planner for each tree.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tuner.errors import EnvironmentMissingError
from tuner.regress.records import Effort

WORKER: Final = Path(__file__).with_name("worker.py")
OWN_TREE: Final = Path(__file__).parents[2]
LARGEST_ANSWER_BYTES: Final = 64 * 2**20
LARGEST_TALK_BYTES: Final = 2**16
"""Of what a broken worker said, the end of which is told."""
NO_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one scenario may take."""

    solve_s: float = 120.0
    """Given to the planner as its time limit."""
    wall_s: float = 600.0
    """After which the process is killed."""
    memory_bytes: int = 16 * 2**30
    """Of address space, which is more than is resident; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to plan."""

    kind: str
    spec: Path
    profiles: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan as JSON with what it took, or one line that says why there is none."""

    plan: Mapping[str, Any] | None = None
    effort: Effort | None = None
    error: str = ""


Plan = Callable[[Job], Answer]


class Planner:
    """A process that plans with one version of moetune; use it as a context manager."""

    def __init__(self, *, scratch: Path, limits: Limits, tree: Path = OWN_TREE) -> None:
        self._scratch = Path(tempfile.mkdtemp(dir=scratch))
        self._limits = limits
        self._tree = tree
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._starting = threading.Lock()

    def __enter__(self) -> "Planner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def plan(self, job: Job) -> Answer:
        """Plan, in a process that may break."""
        with self._starting:
            if self._stopped:
                return Answer(error="stopped")
            process = self._started()
        reply = self._scratch / "reply.json"
        reply.unlink(missing_ok=True)
        asked = {
            "kind": job.kind,
            "spec": str(job.spec.absolute()),
            "profiles": [str(each.absolute()) for each in job.profiles],
            "time_limit_s": self._limits.solve_s,
            "memory_limit_bytes": self._limits.memory_bytes,
            "reply": str(reply),
        }
        told = self._told(process, json.dumps(asked).encode() + b"\n")
        if isinstance(told, str):
            self.close()
            return Answer(error=told)
        if told["status"] != 0 or not reply.is_file():
            return Answer(error=_broken(int(told["status"]), self._said()))
        return _answer(reply, peak_bytes=int(told["peak_bytes"]))

    def stop(self) -> None:
        """Kill what runs, from whichever thread; the thread that waits for it hears of its end."""
        with self._starting:
            self._stopped = True
            self._kill(self._process)

    def close(self) -> None:
        """End the process and everything that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        self._kill(process)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    @staticmethod
    def _kill(process: subprocess.Popen[bytes] | None) -> None:
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        if not hasattr(os, "fork"):
            raise EnvironmentMissingError(
                "moetune check needs processes that fork; run it on Linux or macOS"
            )
        self.close()
        environment = {
            **os.environ,
            **dict.fromkeys(NO_THREADS, "1"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(self._tree), os.getenv("PYTHONPATH")))),
        }
        with (self._scratch / "said").open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                env=environment,
                cwd=self._scratch,
                start_new_session=True,
            )
        return self._process

    def _told(self, process: subprocess.Popen[bytes], line: bytes) -> dict[str, Any] | str:
        """Return what the worker says of a job, or why it says nothing."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return f"the planning process does not start: {self._said()}"
        ready, _, _ = select.select([process.stdout], [], [], self._limits.wall_s)
        if not ready:
            return f"no plan within {self._limits.wall_s:g} s; allow more with --time-limit"
        answer = process.stdout.readline()
        if not answer:
            return f"the planning process ended early: {self._said()}"
        told: dict[str, Any] = json.loads(answer)
        return told

    def _said(self) -> str:
        """Return the last line on the worker's stderr."""
        data = (self._scratch / "said").read_bytes()[-LARGEST_TALK_BYTES:]
        lines = data.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _broken(status: int, said: str) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"planning was killed by {signal.Signals(-code).name}"
    return f"planning crashed: {said}"


def _answer(reply: Path, *, peak_bytes: int) -> Answer:
    if reply.stat().st_size > LARGEST_ANSWER_BYTES:
        return Answer(error=f"the plan is larger than {LARGEST_ANSWER_BYTES} bytes")
    told = json.loads(reply.read_bytes())
    if "error" in told:
        return Answer(error=told["error"])
    effort = Effort(
        cpu_s=told["cpu_s"],
        loop_s=told["loop_s"],
        idle_bytes=told["idle_bytes"],
        peak_bytes=max(peak_bytes, told["idle_bytes"]),
    )
    return Answer(plan=told["plan"], effort=effort)
