"""Start one trial on this machine and see to its end: report, failure or hang; nothing is left.

Whatever ends a trial (its report, a crash, the deadline, Ctrl-C), all of its processes are gone
before `launch_locally` returns. torchrun gives every rank a session of its own, so they are found
by descent and not by process group. Should this process itself be killed, ranks notice that and
end (`--parent`), at the latest at their `--deadline`. Verification calls any function of type
`Launcher`, so that tests and other schedulers bring their own.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import psutil
from pydantic import ValidationError

from profilers.steps.config import StepConfig, StepReport
from tuner.errors import EnvironmentMissingError
from tuner.verify.records import TrialStatus

GRACE_S: Final = 3.0
"""Between asking processes to end and killing them."""

STDERR_TAIL_BYTES: Final = 64 * 1024
OUT_OF_MEMORY_MARK: Final = "is out of memory"
"""What profilers/steps prints before it exits for lack of memory."""

KILLED_MARKS: Final = ("exitcode: -9", "exitcode  : -9", "Signal 9 (SIGKILL)")
"""How torchrun reports a rank that the kernel killed, which on a full machine means memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """How a trial ended."""

    status: TrialStatus
    reason: str
    report: StepReport | None
    wall_s: float


class Launcher(Protocol):
    """Runs a step configuration in a folder of its own, within a deadline in seconds."""

    def __call__(self, config: StepConfig, *, folder: Path, deadline_s: float) -> LaunchResult: ...


def launch_locally(config: StepConfig, *, folder: Path, deadline_s: float) -> LaunchResult:
    """Run the reference step with torchrun on this machine.

    Raises:
        EnvironmentMissingError: PyTorch is not installed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config_file, report_file = folder / "step.json", folder / "report.json"
    config_file.write_text(config.model_dump_json(indent=1), encoding="utf-8")
    report_file.unlink(missing_ok=True)
    command = trial_command(
        config, config_file=config_file, report_file=report_file, deadline_s=deadline_s
    )
    start_s = time.monotonic()
    with (folder / "stderr.txt").open("wb") as errors:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                env=trial_environment(os.environ),
                start_new_session=True,
            )
        except FileNotFoundError as error:
            raise EnvironmentMissingError(
                f"{command[0]!r} is not installed: pip install 'moetune[torch]'"
            ) from error
        try:
            exit_code: int | None = process.wait(timeout=deadline_s)
        except subprocess.TimeoutExpired:
            exit_code = None
        finally:
            end_tree(process)
    wall_s = time.monotonic() - start_s
    if exit_code is None:
        reason = f"no report after {deadline_s:.0f} s; the trial was ended"
        return LaunchResult(status="timeout", reason=reason, report=None, wall_s=wall_s)
    tail = _tail(folder / "stderr.txt")
    return judge(exit_code, tail=tail, report_file=report_file, wall_s=wall_s)


def trial_command(
    config: StepConfig, *, config_file: Path, report_file: Path, deadline_s: float
) -> tuple[str, ...]:
    """Return the command of one trial; one rank needs no launcher."""
    step = (
        *(sys.executable, "-P", "-m", "profilers.steps", str(config_file)),
        f"--report={report_file}",
        f"--deadline={deadline_s + GRACE_S:.0f}",
        f"--parent={os.getpid()}",
    )
    world = config.parallelism.world
    if world == 1:
        return step
    launcher = (sys.executable, "-P", "-m", "torch.distributed.run")
    return (*launcher, "--standalone", f"--nproc-per-node={world}", "--no-python", *step)


def trial_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Pin threads, and drop what a surrounding launcher may have left for its own ranks."""
    kept = {
        name: value
        for name, value in environment.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        and not name.startswith("TORCHELASTIC_")
    }
    # Ranks of one host meet over loopback, whatever the host believes its name to be.
    return {"GLOO_SOCKET_IFNAME": "lo"} | kept | {"OMP_NUM_THREADS": "1"}


def judge(exit_code: int, *, tail: str, report_file: Path, wall_s: float) -> LaunchResult:
    """Turn an exit code, the end of the log and a report into a result."""
    if exit_code == 0:
        try:
            report = StepReport.model_validate_json(report_file.read_bytes())
        except (OSError, ValidationError):
            reason = "the trial ended without a readable report"
            return LaunchResult(status="crashed", reason=reason, report=None, wall_s=wall_s)
        return LaunchResult(status="ok", reason="", report=report, wall_s=wall_s)
    if OUT_OF_MEMORY_MARK in tail:
        line = next(line for line in tail.splitlines() if OUT_OF_MEMORY_MARK in line)
        return LaunchResult(
            status="out_of_memory", reason=line.strip()[:300], report=None, wall_s=wall_s
        )
    if exit_code == -signal.SIGKILL or any(mark in tail for mark in KILLED_MARKS):
        reason = "a rank was killed by the system, most likely for lack of memory"
        return LaunchResult(status="out_of_memory", reason=reason, report=None, wall_s=wall_s)
    return LaunchResult(
        status="crashed", reason=_last_error(tail, exit_code), report=None, wall_s=wall_s
    )


def end_tree(process: "subprocess.Popen[bytes]") -> None:
    """End a process and everything it started, asking first."""
    try:
        leader = psutil.Process(process.pid)
        tree = [leader, *leader.children(recursive=True)]
    except psutil.NoSuchProcess:
        tree = []
    for signalled in (signal.SIGTERM, signal.SIGKILL):
        for one in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(signalled)
        _, tree = psutil.wait_procs(tree, timeout=GRACE_S)
    process.wait()


def _tail(file: Path) -> str:
    with file.open("rb") as stream:
        stream.seek(max(0, file.stat().st_size - STDERR_TAIL_BYTES))
        return stream.read().decode("utf-8", errors="replace")


def _last_error(tail: str, exit_code: int) -> str:
    """The last line that looks like an exception; torchrun prints much around it."""
    errors = [
        line.split("]: ", 1)[-1].strip()
        for line in tail.splitlines()
        if "Error" in line and "ChildFailedError" not in line and "error_file" not in line
    ]
    return (errors[-1] if errors else f"exit code {exit_code}")[:300]
