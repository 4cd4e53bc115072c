"""Runs planning in worker processes, bounded in time and memory, and ended with this process.

One `Planner` holds one process of tuner/regress/worker.py, which forks for every job. A job that
crashes loses only its own result; one that exceeds its time is killed with its process group, and
the next job starts a new process.

    tree         folder with the packages tuner, solvers, profilers of the version that plans
    Job          what to plan
    PlanResult   the plan, or why there is none

Not covered: other machines. Each thread has a planner for each tree.
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

WORKER: Final = Path(__file__).with_name("worker.py")
OWN_TREE: Final = Path(__file__).parents[2]
LARGEST_REPLY_BYTES: Final = 64 * 2**20
LARGEST_TALK_BYTES: Final = 2**16
"""Bytes of a broken worker's stderr that are read; a report shows their end."""
NO_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one scenario."""

    solve_s: float = 120.0
    """Given to the planner as its time limit."""
    wall_s: float = 600.0
    """Seconds of wall time after which the process is killed."""
    memory_bytes: int = 16 * 2**30
    """Bytes of address space, which is more than is resident; 0: no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanningJob:
    """Spec and profiles of one planning run."""

    kind: str
    spec: Path
    profiles: tuple[Path, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanResult:
    """A plan as JSON, or in one line why there is none."""

    plan: Mapping[str, Any] | None = None
    cpu_s: float | None = None
    """Processor time of planning."""
    error: str = ""


Plan = Callable[[PlanningJob], PlanResult]


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

    def plan(self, job: PlanningJob) -> PlanResult:
        """Plan a job in the worker process."""
        with self._starting:
            if self._stopped:
                return PlanResult(error="stopped")
            process = self._running_process()
        reply = self._scratch / "reply.json"
        reply.unlink(missing_ok=True)
        request = {
            "spec": str(job.spec.absolute()),
            "profiles": [str(profile.absolute()) for profile in job.profiles],
            "time_limit_s": self._limits.solve_s,
            "memory_limit_bytes": self._limits.memory_bytes,
            "reply": str(reply),
        }
        reply_line = self._send_job(process, json.dumps(request).encode() + b"\n")
        if isinstance(reply_line, str):
            self.close()
            return PlanResult(error=reply_line)
        if reply_line["status"] != 0 or not reply.is_file():
            return PlanResult(error=_broken(int(reply_line["status"]), self._last_stderr_line()))
        return _read_reply(reply, cpu_s=float(reply_line["cpu_s"]))

    def stop(self) -> None:
        """Kill the running job, from any thread; the thread that waits for it is woken."""
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

    def _running_process(self) -> subprocess.Popen[bytes]:
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

    def _send_job(self, process: subprocess.Popen[bytes], line: bytes) -> dict[str, Any] | str:
        """Send a job; return the worker's status line, or why there is none."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            return f"the planning process does not start: {self._last_stderr_line()}"
        ready, _, _ = select.select([process.stdout], [], [], self._limits.wall_s)
        if not ready:
            return f"no plan within {self._limits.wall_s:g} s; allow more with --time-limit"
        line_read = process.stdout.readline()
        if not line_read:
            return f"the planning process ended early: {self._last_stderr_line()}"
        status_line: dict[str, Any] = json.loads(line_read)
        return status_line

    def _last_stderr_line(self) -> str:
        """Return the last line on the worker's stderr."""
        data = (self._scratch / "said").read_bytes()[-LARGEST_TALK_BYTES:]
        lines = data.decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")


def _broken(status: int, said: str) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"planning was killed by {signal.Signals(-code).name}"
    return f"planning crashed: {said}"


def _read_reply(reply: Path, *, cpu_s: float) -> PlanResult:
    if reply.stat().st_size > LARGEST_REPLY_BYTES:
        return PlanResult(error=f"the plan is larger than {LARGEST_REPLY_BYTES} bytes")
    values = json.loads(reply.read_bytes())
    if "error" in values:
        return PlanResult(error=values["error"])
    return PlanResult(plan=values["plan"], cpu_s=cpu_s)
