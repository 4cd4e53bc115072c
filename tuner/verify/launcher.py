"""Runs one trial on this machine until its report, failure or hang; no process is left behind.

Whatever ends a trial (its report, a crash, the deadline, Ctrl-C), all of its processes are gone
before `run_command` returns. Every rank has its own session, and ranks of torchrun outlive a killed
torchrun, so neither process groups nor parentage find them all: every process of a trial has the
trial's folder in its environment, under `TRIAL_MARK`, or is in the session that its command began
(tuner/verify/termination.py). If this process itself is killed, ranks notice it and end
(`--parent`), at the latest at their `--deadline`.

Verification calls any `TrialLauncher`, so tests, schedulers and engines bring their own. The
reference step reports its timed steps in the trial's folder as it runs, so a hopeless trial is
ended early.

Not covered: processes of a trial that clear their environment or belong to another user.
"""

import contextlib
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from pydantic import ValidationError

from profilers.files import open_regular, read_bounded
from profilers.local_ranks import PARENT, RENDEZVOUS
from profilers.steps.config import StepConfig, StepReport
from tuner.config.train import TrainDecision
from tuner.engines.reference.step_config import step_config
from tuner.errors import EnvironmentMissingError
from tuner.plans.folder import MAX_RECORD_BYTES
from tuner.plans.train import Plan, TrainPrediction
from tuner.verify.records import TrialStatus
from tuner.verify.termination import GRACE_S, LOOK_S, ensure_ended, start_marked

UNBUFFERED: Final = {"PYTHONUNBUFFERED": "1"}
"""Default: Python would otherwise write a log file in blocks, after its errors, and too late to end
a hopeless trial."""

WATCH_S: Final = 1.0
"""Polling interval of a trial that reports its steps."""

CONFIG_NAME: Final = "step.json"
REPORT_NAME: Final = "report.json"
LOG_NAME: Final = "log.txt"

NO_REPORT: Final = "no report after"
"""Beginning of the reason of a trial that missed its deadline."""

NODE_GONE: Final = "a node of the job could not be reached any more"
"""Reason of a trial that Slurm lost, whatever the trial is."""

LOG_TAIL_BYTES: Final = 64 * 1024
LAUNCHER_VARIABLES: Final = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", RENDEZVOUS, PARENT}
)

OUT_OF_MEMORY_MARK: Final = "is out of memory"
"""Printed by profilers/steps before it exits out of memory."""

ENGINES_OUT_OF_MEMORY: Final = ("CUDA out of memory", "torch.OutOfMemoryError")
"""PyTorch's messages in an engine's log."""

OUT_OF_MEMORY_EXIT: Final = 77
"""Exit code of profilers/steps then."""

COLOUR: Final = re.compile(r"\x1b\[[0-9;]{0,16}[A-Za-z]")
"""ANSI colour codes."""

RANK_EXIT_CODE: Final = re.compile(r"exitcode\s*: (-?\d+)")
"""Text by which torchrun and profilers/local_ranks.py report a rank that failed."""

EXCEPTION: Final = re.compile(
    r"(?:^|[\s\]):>-])((?:[A-Za-z_]\w{0,60}\.){0,8}[A-Z]\w{0,60}(?:Error|Exception)(?::.*|$))"
)
"""The last line of a traceback, after any prefix of ranks, launchers and loggers."""

NO_CAUSE: Final = re.compile(
    r"warn|ChildFailedError|error_file|See root cause above", re.IGNORECASE
)
"""Lines that mention an error but are not its cause."""

RANK_DIED: Final = re.compile(r"^profilers\.local_ranks: (rank \d+ died with \w+)", re.MULTILINE)
"""Text by which profilers/local_ranks.py names a rank whose peers then fail with errors of their
own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMetrics:
    """Metrics read from an engine's log."""

    steps_s: tuple[float, ...]
    """Timed steps, warm-up excluded."""
    activation_bytes: tuple[int, ...] = ()
    """Bytes of activations per pipeline rank, peak over its devices; empty if the engine does not
    report them."""
    peak_bytes: int | None = None
    """Largest reported memory use of a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """Outcome of a trial."""

    status: TrialStatus
    reason: str
    report: StepReport | None
    """Report of the reference step; None for other engines and where there was none."""
    wall_s: float
    metrics: EngineMetrics | None = None
    """Metrics from the log of another engine."""


Hopeless = Callable[[Sequence[float]], str]
"""Returns why to end a trial early, given its timed steps so far; empty to go on."""


def never_hopeless(_steps_s: Sequence[float]) -> str:
    """Let a trial run to its end."""
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One trial to start."""

    plan: Plan
    decision: TrainDecision
    predicted: TrainPrediction
    steps: int
    """Timed steps."""
    warmup_steps: int
    folder: Path
    """Folder of this trial only."""
    deadline_s: float
    latest_s: float = math.inf
    """Seconds from the launch until the budget ends; no engine gets longer, however slowly it
    starts."""
    hopeless: Hopeless = field(default=never_hopeless)

    def reason_to_end(self, steps_s: Sequence[float]) -> str:
        """Return why to end the trial after these timed steps; empty to go on."""
        # A trial that has done all steps is about to report, which holds more than its steps.
        return self.hopeless(steps_s) if len(steps_s) < self.steps else ""

    def step_config(self) -> StepConfig:
        """Return the decision as the reference step runs it.

        If the spec states the memory of a device, the trial is limited to the part that a plan may
        use: what would not fit there must not fit here.
        """
        config = step_config(
            self.plan, self.decision, steps=self.steps, warmup_steps=self.warmup_steps
        )
        stated = [
            int(pool.memory_per_device * pool.usable_memory_ratio)
            for pool in self.plan.cluster.pools
            if pool.memory_per_device is not None
        ]
        return config.model_copy(update={"memory_limit_bytes": min(stated, default=None)})


class TrialLauncher(Protocol):
    """Runs one trial to its end."""

    def __call__(self, launch: Launch) -> LaunchResult: ...


def launch_locally(launch: Launch) -> LaunchResult:
    """Run the reference step on ranks of this machine (profilers/local_ranks.py).

    Raises:
        EnvironmentMissingError: PyTorch is not installed.
    """
    if importlib.util.find_spec("torch") is None:
        raise EnvironmentMissingError(
            "trials need PyTorch, which is not installed: pip install 'moetune[torch]'"
        )
    folder, config, deadline_s = launch.folder, launch.step_config(), launch.deadline_s
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_NAME).write_text(config.model_dump_json(indent=1), encoding="utf-8")
    command = trial_command(config, folder=folder, deadline_s=deadline_s)
    return launch_command(
        command, folder=folder, deadline_s=deadline_s, hopeless=launch.reason_to_end
    )


def trial_command(config: StepConfig, *, folder: Path, deadline_s: float) -> tuple[str, ...]:
    """Return the command of one trial; one rank needs no launcher."""
    python = (sys.executable, "-P", "-m")
    step = (
        *("profilers.steps", str(folder / CONFIG_NAME)),
        f"--report={folder / REPORT_NAME}",
        f"--progress={folder / PROGRESS_NAME}",
        f"--deadline={deadline_s + GRACE_S:.0f}",
        f"--parent={os.getpid()}",
    )
    world = config.parallelism.world
    if world == 1:
        return (*python, *step)
    return (*python, "profilers.local_ranks", f"--ranks={world}", f"--folder={folder}", *step)


def launch_command(
    command: Sequence[str],
    *,
    folder: Path,
    deadline_s: float,
    hopeless: Hopeless = never_hopeless,
) -> LaunchResult:
    """Run a command that leaves `report.json` in the folder, and classify its end."""
    (folder / REPORT_NAME).unlink(missing_ok=True)
    (folder / PROGRESS_NAME).unlink(missing_ok=True)
    ran = run_command(
        command,
        folder=folder,
        deadline_s=deadline_s,
        environment=trial_environment(os.environ),
        watch=lambda: hopeless(steps_so_far(folder)),
    )
    return reference_result(ran, folder, deadline_s=deadline_s, tail=log_tail(folder / LOG_NAME))


def reference_result(
    ran: "CommandRun", folder: Path, *, deadline_s: float, tail: str
) -> LaunchResult:
    """Return the result of a reference step from the end of its command."""
    steps_s, wall_s = steps_so_far(folder), ran.wall_s
    if ran.stopped:
        metrics = EngineMetrics(steps_s=steps_s)
        return LaunchResult(
            status="ok", reason=ran.stopped, report=None, wall_s=wall_s, metrics=metrics
        )
    if ran.exit_code is None:
        return timeout_result(deadline_s, wall_s=wall_s, steps=len(steps_s))
    if ran.exit_code:
        return failure_result(ran.exit_code, tail=tail, wall_s=wall_s)
    try:
        report = StepReport.model_validate_json(
            read_bounded(folder / REPORT_NAME, most_bytes=MAX_RECORD_BYTES)
        )
    except (OSError, ValidationError):
        reason = "the trial ended without a readable report"
        return LaunchResult(status="crashed", reason=reason, report=None, wall_s=wall_s)
    return LaunchResult(status="ok", reason="", report=report, wall_s=wall_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRun:
    """Outcome of a command."""

    exit_code: int | None
    """Exit code of the command; None if it was ended."""
    stopped: str
    """Reason why `watch` ended it; empty if it did not."""
    wall_s: float


def run_command(
    command: Sequence[str],
    *,
    folder: Path,
    deadline_s: float,
    environment: Mapping[str, str],
    watch: Callable[[], str] | None = None,
    option: str = "--command",
) -> CommandRun:
    """Run a command to its end with its output in the folder's log; leave none of its processes.

    Args:
        command: program and arguments; no shell reads them.
        folder: of the trial.
        deadline_s: after which it is ended.
        environment: of the command.
        watch: called every second; a non-empty reason ends the command.
        option: that named the command.

    Raises:
        EnvironmentMissingError: the command's program does not exist.
    """
    exit_code, stopped = None, ""
    start_s = time.monotonic()
    with running(command, folder=folder, environment=environment, option=option) as process:
        while exit_code is None and not stopped:
            left_s = start_s + deadline_s - time.monotonic()
            if left_s <= 0.0:
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(timeout=min(left_s, WATCH_S) if watch else left_s)
            stopped = watch() if watch and exit_code is None else ""
    return CommandRun(exit_code=exit_code, stopped=stopped, wall_s=time.monotonic() - start_s)


@contextmanager
def running(
    command: Sequence[str],
    *,
    folder: Path,
    environment: Mapping[str, str],
    option: str = "--command",
    patience_s: float = 0.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command while this is entered; leave none of its processes.

    Args:
        command: program and arguments; no shell reads them.
        folder: of the trial, with the log.
        environment: of the command.
        option: that named the command.
        patience_s: how long the command may take to end its processes, remote ones too, before all
            are ended; a second signal ends it at once.

    Raises:
        EnvironmentMissingError: the command's program does not exist.
    """
    process: subprocess.Popen[bytes] | None = None
    try:
        with (
            (folder / LOG_NAME).open("wb") as log,
            ensure_ended(str(folder.resolve())) as interruption,
        ):
            try:
                process = start_marked(
                    command, folder=folder, log=log, environment={**UNBUFFERED, **environment}
                )
            except OSError as error:
                raise EnvironmentMissingError(
                    f"{option}: {command[0]}: {error.strerror}"
                ) from error
            try:
                yield process
            finally:
                if patience_s:
                    process.terminate()
                until_s = time.monotonic() + patience_s
                while time.monotonic() < until_s and not interruption.came:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(timeout=LOOK_S)
                        break
    finally:
        if process is not None:
            process.wait()


def timeout_result(deadline_s: float, *, wall_s: float, steps: int) -> LaunchResult:
    """Return the result of a trial that was ended at its deadline.

    Args:
        deadline_s: after which it was ended.
        wall_s: that it took.
        steps: timed steps that it had reported.
    """
    steps_text = f", {steps} timed steps" if steps else ""
    reason = f"{NO_REPORT} {deadline_s:.0f} s{steps_text}; the trial was ended"
    return LaunchResult(status="timeout", reason=reason, report=None, wall_s=wall_s)


def trial_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Pin threads, and drop variables of a surrounding launcher."""
    return without_launcher(environment) | {"OMP_NUM_THREADS": "1"}


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without the variables of a surrounding launcher."""
    return {
        name: value
        for name, value in environment.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("TORCHELASTIC_")
    }


def failure_result(exit_code: int, *, tail: str, wall_s: float) -> LaunchResult:
    """Return the result of a failed trial, with the reason from its log tail."""
    lack = _lack_of_memory(exit_code, tail)
    if lack:
        return LaunchResult(status="out_of_memory", reason=lack, report=None, wall_s=wall_s)
    return LaunchResult(
        status="crashed", reason=_last_error(tail, exit_code), report=None, wall_s=wall_s
    )


def log_tail(file: Path) -> str:
    """Return the tail of a log; empty if there is none."""
    if not file.is_file():
        return ""
    with open_regular(file) as stream:
        stream.seek(max(0, file.stat().st_size - LOG_TAIL_BYTES))
        return stream.read(LOG_TAIL_BYTES).decode("utf-8", errors="replace")


def _lack_of_memory(exit_code: int, tail: str) -> str:
    """Return the out-of-memory message; empty if memory did not run out."""
    marks = (OUT_OF_MEMORY_MARK, *ENGINES_OUT_OF_MEMORY)
    message = next((line for line in tail.splitlines() if any(mark in line for mark in marks)), "")
    if message:
        return message.strip()[:300]
    codes = {_signalled(code) for code in (exit_code, *map(int, RANK_EXIT_CODE.findall(tail)))}
    if OUT_OF_MEMORY_EXIT in codes:
        return "a rank ran out of memory"
    if -signal.SIGKILL in codes:
        # Only the OOM killer kills a process while its trial runs.
        return "a process was killed by the system, most likely for lack of memory"
    return ""


def _signalled(code: int) -> int:
    """Return an exit code in Python's convention; shells add 128 to a signal's number."""
    return 128 - code if 128 < code < 128 + signal.NSIG else code


def _last_error(tail: str, exit_code: int) -> str:
    """The rank that was killed, else the last exception, else the last error, else the last line.

    torchrun prints much around them; the last line is appended to the exit code.
    """
    if died := RANK_DIED.search(tail):
        return died[1]
    lines = [line for line in map(printable, tail.splitlines()) if line]
    causes = [line for line in lines if not NO_CAUSE.search(line)]
    raised = [match[1] for line in causes if (match := EXCEPTION.search(line))]
    errors = raised or [line.split("]: ", 1)[-1] for line in causes if "Error" in line]
    if errors:
        return errors[-1][:300]
    return ": ".join((_ended_by(exit_code), *lines[-1:]))[:300]


def _ended_by(exit_code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"exit code {exit_code} ({signal.Signals(-_signalled(exit_code)).name})"
    return f"exit code {exit_code}"


def printable(line: str) -> str:
    """Return a line without colours and without letters that a terminal would heed."""
    line = COLOUR.sub("", line)
    return "".join(letter if letter.isprintable() else " " for letter in line).strip()


PROGRESS_NAME: Final = "progress.jsonl"
MOST_BYTES: Final = 64 * 2**20


def steps_so_far(folder: Path) -> tuple[float, ...]:
    """Return the timed steps of a trial so far, in seconds; incomplete lines are skipped."""
    try:
        text = read_bounded(folder / PROGRESS_NAME, most_bytes=MOST_BYTES).decode()
        return tuple(float(json.loads(line)["step_s"]) for line in text.split("\n")[:-1])
    except (OSError, ValueError, KeyError, TypeError):
        return ()
