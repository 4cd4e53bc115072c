"""Run jobs with checkpoints by forking their ranks, so that PyTorch is loaded once for all of them.

    python -P -m tests.profilers.steps.checkpoint_jobs

Reads a `Job` in JSON from each line of stdin, and answers with the exit codes of its ranks. A job
may be killed: at a certain event of a certain rank that rank kills itself, or all ranks are killed
some time after it.
"""

import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from profilers.errors import RankError
from profilers.local_ranks import (
    FOLDER_PREFIX,
    LOOPBACK_ONLY,
    PARENT,
    RENDEZVOUS,
    STORE_NAME,
)
from profilers.steps.checkpointed_run import run_with_checkpoints
from profilers.steps.config import StepConfig
from profilers.steps.events import Emit, events_file
from profilers.steps.run import start

DEADLINE_S = 120


@dataclass(frozen=True, kw_only=True)
class Kill:
    """When ranks are killed."""

    event: str
    level: str | None
    rank: int
    times: int
    """How often the event has to come before."""
    delay_s: float | None = None
    """After the event, of all ranks; None: at the event, of this rank, and of the others then."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A launch of a run."""

    config: str
    """File of the step configuration."""
    events: str
    log: str
    """What ranks print."""
    kill: Kill | None = None
    largest_file_bytes: int | None = None
    """Of rank 0 until a save has failed: larger files are as on a full disk."""


class Jobs:
    """The process that forks ranks, from the side of a test."""

    def __init__(self, process: Any) -> None:
        self._process = process

    def run(self, job: Job) -> list[int]:
        """Run a job to its end, and return the exit codes of its ranks, negative for signals."""
        self._process.stdin.write(json.dumps(asdict(job)) + "\n")
        self._process.stdin.flush()
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes


def main() -> None:
    """Run the jobs that come, one after the other."""
    torch.set_num_threads(1)
    os.environ.update(LOOPBACK_ONLY)
    answers = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        fields = json.loads(line)
        kill = fields.pop("kill")
        job = Job(**fields, kill=kill and Kill(**kill))
        with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as folder:
            codes = _run(job, Path(folder))
        os.write(answers, (json.dumps(codes) + "\n").encode())


def _run(job: Job, folder: Path) -> list[int]:
    config = StepConfig.model_validate_json(Path(job.config).read_text(encoding="utf-8"))
    world = config.parallelism.world
    wake, waker = os.pipe()
    parent = os.getpid()
    pids = []
    for rank in range(world):
        pid = os.fork()
        if not pid:
            os.environ.update(
                {
                    RENDEZVOUS: str(folder / STORE_NAME),
                    PARENT: str(parent),
                    "RANK": str(rank),
                    "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(world),
                }
            )
            _become_rank(job, config, waker)
        pids.append(pid)
    os.close(waker)
    codes: dict[int, int] = {}
    deadline_s = time.monotonic() + DEADLINE_S
    while len(codes) < world:
        awake, _, _ = select.select([wake], [], [], 0.005)
        if awake and os.read(wake, 1):
            time.sleep((job.kill and job.kill.delay_s) or 0.0)
            _kill(pids, codes)
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        # A rank that failed leaves the others waiting.
        if any(codes.values()) or time.monotonic() > deadline_s:
            _kill(pids, codes)
    os.close(wake)
    return [codes[pid] for pid in pids]


def _kill(pids: list[int], codes: dict[int, int]) -> None:
    for pid in set(pids) - set(codes):
        os.kill(pid, signal.SIGKILL)


def _become_rank(job: Job, config: StepConfig, waker: int) -> None:
    code = 1
    try:
        log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        rank = int(os.environ["RANK"])
        with events_file(Path(job.events), rank) as emit:
            layout = start(config, device=torch.device("cpu"))
            assert config.checkpoints is not None
            if job.kill is not None and job.kill.rank == rank:
                emit = _killing(emit, job.kill, waker)
            if job.largest_file_bytes is not None and rank == 0:
                emit = _limited(emit, job.largest_file_bytes)
            run_with_checkpoints(config, config.checkpoints, layout, emit)
        code = 0
    except RankError as error:
        sys.stderr.write(f"{error}\n")
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _killing(emit: Emit, kill: Kill, waker: int) -> Emit:
    left = kill.times

    def watched(event: str, /, **fields: Any) -> None:
        nonlocal left
        emit(event, **fields)
        if (event, fields.get("level")) != (kill.event, kill.level):
            return
        left -= 1
        if left:
            return
        if kill.delay_s is None:
            os.kill(os.getpid(), signal.SIGKILL)
        os.write(waker, b"!")

    return watched


def _limited(emit: Emit, largest_file_bytes: int) -> Emit:
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file_bytes, most))

    def watched(event: str, /, **fields: Any) -> None:
        if event == "save_failed":
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        emit(event, **fields)

    return watched


if __name__ == "__main__":
    main()
