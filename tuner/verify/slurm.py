"""Runs the reference step of each trial as a Slurm job, until its end.

A trial is a command like any other (tuner/verify/launcher.py): `sbatch --wait`, which submits
`job.sh`, waits for the job through outages of the controller and ends with the job's exit code.
Whatever ends that command cancels the job by its name. The trial's folder is inside the plan's, on
a file system that all nodes share.

    submitted -> waits in the queue (bounded) -> runs (bounded by its deadline) -> report or failure
                        ^                            |
                        +---- a node failed or the job was preempted: Slurm queues it again, at most
                              MOST_RESTARTS times

`job.sh` runs on the first node of the allocation (sbatch(1)), where torchrun's ranks rendezvous;
ranks of one node connect through a file (profilers/local_ranks.py). Ranks fail before Slurm notices
a dead node, so a failed run is followed by an empty task on every node: if that cannot be started,
the node has failed, and the job is requeued. A job whose verification has gone, and the machine of
that verification with it, finds no folder to run in, or ends at its time limit.

The user's options are passed through as arguments of sbatch. Names are checked for their form only,
because clusters have their own; those that the launcher sets are refused, and so are prefixes of
them that sbatch would accept: it reads `arra=1-4` as `array=1-4` (getopt_long(3)).

Not covered: clusters whose nodes do not share the plan's folder; job arrays (trials differ in
shape); federations of several clusters.
"""

import re
import secrets
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from tuner.engines.launchers.sbatch import training_resources
from tuner.engines.launchers.shape import LaunchShape, launch_shape
from tuner.errors import EnvironmentMissingError, SchedulerError, SpecError
from tuner.output import write_files
from tuner.units import format_s
from tuner.verify.launcher import (
    CONFIG_NAME,
    LOG_NAME,
    NODE_GONE,
    PROGRESS_NAME,
    REPORT_NAME,
    Launch,
    LaunchResult,
    log_tail,
    reference_result,
    run_command,
    steps_so_far,
)
from tuner.verify.records import TrialStatus
from tuner.verify.termination import GRACE_S, TRIAL_MARK

Options = tuple[tuple[str, str], ...]
"""Long options of sbatch without their dashes, and their values."""

OWN: Final = frozenset(
    {
        "array",
        "chdir",
        "cluster-constraint",
        "clusters",
        "error",
        "get-user-env",
        "job-name",
        "nodes",
        "no-requeue",
        "ntasks",
        "ntasks-per-node",
        "open-mode",
        "output",
        "parsable",
        "requeue",
        "tasks-per-node",
        "test-only",
        "wait",
        "wrap",
    }
)
"""Options that the launcher sets: a trial is one job of a given shape on this cluster, cancelled by
its name. Sbatch also accepts `tasks-per-node`, though sbatch(1) does not list it."""

_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,63}")


def parse_options(written: Iterable[str]) -> Options:
    """Read `name=value` pairs.

    Raises:
        SpecError: a pair is malformed, or its name is set by the launcher.
    """
    return tuple(_parsed(pair) for pair in written)


def _parsed(pair: str) -> tuple[str, str]:
    name, equals, value = pair.partition("=")
    name = name.removeprefix("--")
    if not equals or not _NAME.fullmatch(name) or not value.isprintable():
        raise SpecError(
            f"--slurm {pair!r} is not name=value of an option of sbatch, e.g. partition=gpu"
        )
    if meant := sorted(option for option in OWN if option.startswith(name)):
        raise SpecError(
            f"--slurm {name}: sbatch reads it as {meant[0]!r}, which moetune sets for every trial;"
            " leave it out"
        )
    return name, value


PROGRAMS: Final = ("sbatch", "scancel")
JOB_NAME: Final = "job.sh"
JOB_LOG_NAME: Final = "job.log"
STARTED_NAME: Final = "started"

SETTLE_S: Final = 30.0
"""Seconds that a shared file system may take to show the report of a job that has ended."""

MOST_RESTARTS: Final = 3
"""Restarts of one trial after lost nodes; a trial that takes a node down each time must end."""

LOST_NODE_EXIT: Final = 69
"""Exit code of a job whose node was lost and that is not requeued (EX_UNAVAILABLE of
sysexits.h)."""

DEADLINE_EXIT: Final = 124
"""Exit code of timeout(1) when it ended its command."""

PROBE_S: Final = 60
"""Seconds for an empty task; Slurm gives an ending step about as long."""

_SUBMITTED: Final = re.compile(r"^(\d+)(?:;\S*)?$", re.MULTILINE)
"""The job's id, as `sbatch --parsable` prints it."""
RESTARTED: Final = "moetune: Slurm has started the job again"
"""Line in a job's log between two of its runs; a requeued job appends to one log."""
_FAILURES: Final[tuple[tuple[str, TrialStatus, str], ...]] = (
    (
        "DUE TO TIME LIMIT",
        "timeout",
        "no report when Slurm ended the job at its time limit; allow more with --slurm time=...",
    ),
    (
        "(?i)oom[-_ ]kill|OOM Killed",
        "out_of_memory",
        "Slurm ended the job for lack of memory",
    ),
    (f"^exit {LOST_NODE_EXIT}\n|DUE TO (NODE FAILURE|PREEMPTION)", "crashed", NODE_GONE),
)
"""How a failed job ended, by its exit code and what slurmstepd writes into its log."""


class SlurmLauncher:
    """A `TrialLauncher`; a resource with jobs, which `stop` cancels."""

    def __init__(
        self,
        *,
        options: Options = (),
        requeue: bool = True,
        queue_s: float = 24 * 3600.0,
        environment: Mapping[str, str],
        on_message: Callable[[str], None],
    ) -> None:
        """Configure the submission of jobs.

        Args:
            options: the user's sbatch options.
            requeue: whether to requeue a job after a node failure or preemption.
            queue_s: seconds that a trial may wait in the queue.
            environment: that sbatch passes to the job.
            on_message: gets a line when a job is submitted and when it starts.
        """
        self._options = options
        self._requeue = requeue
        self._queue_s = queue_s
        reserved = {f"SBATCH_{name.upper().replace('-', '_')}" for name in OWN} | {
            "SBATCH_ARRAY_INX"
        }
        # Other variables of sbatch are the user's, or overruled by its arguments.
        self._environment = {k: v for k, v in environment.items() if k not in reserved}
        self._on_message = on_message
        self._stopping = threading.Event()

    def __call__(self, launch: Launch) -> LaunchResult:
        """Submit a trial and await it.

        Raises:
            SchedulerError: Slurm refuses the job, does not respond, or lets it wait too long.
            EnvironmentMissingError: Slurm is not installed here.
        """
        folder, shape = launch.folder.resolve(), launch_shape(launch.plan, launch.decision)
        config = launch.step_config().model_dump_json(indent=1)
        script = job_script(
            folder=folder,
            shape=shape,
            deadline_s=launch.deadline_s,
            restarts=MOST_RESTARTS if self._requeue else 0,
        )
        write_files(folder, {CONFIG_NAME: config, JOB_NAME: script})
        name = f"moetune-{secrets.token_hex(8)}"
        ran = run_command(
            ("bash", "-c", _WAIT, name, *self._sbatch(name, launch, shape, folder)),
            folder=folder,
            deadline_s=launch.latest_s,
            environment=self._environment,
            watch=self._watch(launch, folder),
            option="--launcher slurm",
        )
        said = log_tail(folder / LOG_NAME)
        tail = log_tail(folder / JOB_LOG_NAME).rpartition(RESTARTED)[2]
        if ran.exit_code and _SUBMITTED.search(said) is None:
            line = re.sub(r"^sbatch: (error: )?", "", said.strip().rpartition("\n")[2])
            line = line or f"exit code {ran.exit_code}"
            raise SchedulerError(f"sbatch does not accept the trial: {line}; resume with --resume")
        if ran.exit_code:
            for pattern, status, reason in _FAILURES:
                if re.search(pattern, f"exit {ran.exit_code}\n{tail}"):
                    return LaunchResult(
                        status=status, reason=reason, report=None, wall_s=ran.wall_s
                    )
        until_s = time.monotonic() + SETTLE_S
        report = folder / REPORT_NAME
        while ran.exit_code == 0 and not report.is_file() and time.monotonic() < until_s:
            time.sleep(0.5)
        if ran.exit_code == DEADLINE_EXIT:
            ran = replace(ran, exit_code=None)
        return reference_result(
            ran, folder, deadline_s=launch.deadline_s, tail=_SUBMITTED.sub("", said) + tail
        )

    def stop(self) -> None:
        """Cancel every running job; their calls raise."""
        self._stopping.set()

    def _sbatch(
        self, name: str, launch: Launch, shape: LaunchShape, folder: Path
    ) -> tuple[str, ...]:
        """Return sbatch's arguments, which overrule its environment variables.

        The user's options replace resources and time limit of the trial.
        """
        given, resources = dict(self._options), training_resources(shape, name=name)
        if {"gpus-per-node", "gres", "gpus"} & given.keys():
            resources.pop("gpus-per-node", None)
        # The log's name is a pattern to sbatch.
        resources["output"] = str(folder / JOB_LOG_NAME).replace("%", "%%")
        limit = {"time": str(2 + int(launch.deadline_s // 60))}
        return (
            *(f"--{option}={value}" for option, value in (limit | resources | given).items()),
            "--open-mode=append",
            "--requeue" if self._requeue else "--no-requeue",
            str(folder / JOB_NAME),
        )

    def _watch(self, launch: Launch, folder: Path) -> Callable[[], str]:
        """Return what is called while a job is awaited, and says why to cancel it."""
        until_s, messages = time.monotonic() + self._queue_s, list[str]()

        def report_once(line: str) -> None:
            if line not in messages:
                messages.append(line)
                self._on_message(line)

        def watch() -> str:
            if self._stopping.is_set():
                raise SchedulerError("the trial was cancelled because another one could not go on")
            if submitted := _SUBMITTED.search(log_tail(folder / LOG_NAME)):
                report_once(f"job {submitted[1]} submitted")
            if not (folder / STARTED_NAME).exists():
                if time.monotonic() > until_s:
                    raise SchedulerError(
                        f"a job has waited {format_s(self._queue_s)} for its nodes; allow more with"
                        " --slurm-wait, or ask for other nodes with --slurm; then --resume"
                    )
                return ""
            report_once(f"job {submitted[1] if submitted else ''} runs")
            return launch.reason_to_end(steps_so_far(folder))

        return watch


def check_programs() -> None:
    """Refuse where Slurm is not installed.

    Raises:
        EnvironmentMissingError: a program is not on the path.
    """
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        raise EnvironmentMissingError(
            f"--launcher slurm needs {missing[0]}, which is not on the path: start moetune on a"
            " machine from which jobs are submitted"
        )


def job_script(*, folder: Path, shape: LaunchShape, deadline_s: float, restarts: int) -> str:
    """Return the batch script.

    Args:
        folder: of the trial, on a file system that all nodes share.
        shape: nodes and devices on each.
        deadline_s: of a run of the trial.
        restarts: how often the job may be requeued after a node failure or preemption.
    """
    step = (
        f"profilers.steps {CONFIG_NAME} --report={REPORT_NAME} --progress={PROGRESS_NAME}"
        f" --deadline={deadline_s + 10 * GRACE_S:.0f}"
    )
    python = f"{shlex.quote(sys.executable)} -P -m"
    start = f"{python} {step}"
    if shape.nodes > 1:
        start = (
            f"{python} torch.distributed.run --nnodes={shape.nodes}"
            f" --nproc-per-node={shape.devices_per_node} {_RENDEZVOUS} --no-python {start}"
        )
    elif shape.num_devices > 1:
        start = f"{python} profilers.local_ranks --ranks={shape.num_devices} {step}"
    return _JOB.format(
        folder=shlex.quote(str(folder)),
        start=shlex.quote(start),
        limit_s=round(deadline_s),
        most_restarts=restarts,
    )


_WAIT: Final = f"""
cancel() {{ env -u {TRIAL_MARK} setsid scancel --quiet --name="$0"; }}
finish() {{
  # A request that is under way may still make a job; a sbatch that hangs must not keep it.
  kill "$request"
  {{ sleep {GRACE_S / 3.0:.0f}; kill -KILL "$request"; }} &
  wait "$request"
  cancel
  exit 143
}} 2> /dev/null
trap finish TERM INT HUP
stdbuf -oL sbatch --wait --parsable "$@" &
request=$!
wait "$request"
code=$?
# Slurm may be about to start a job again, or run one still, that sbatch takes for ended.
((code == 0)) && [[ -e "${{!#%/*}}/{REPORT_NAME}" ]] || cancel
exit "$code"
"""
"""Submits a job and waits for it; `$0` is its name, and the last argument its script."""

_RENDEZVOUS: Final = (
    '--node-rank="$SLURM_NODEID" --rdzv-backend=static'
    ' --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" --log-dir="$PWD/torchrun"'
)

_JOB: Final = f"""#!/usr/bin/env bash
set -u
cd -- {{folder}} || exit 1
restarts="${{{{SLURM_RESTART_COUNT:-0}}}}"
((restarts <= {{most_restarts}})) || exit {LOST_NODE_EXIT}
((restarts == 0)) || echo "{RESTARTED}"
rm -f {REPORT_NAME} {PROGRESS_NAME}
touch {STARTED_NAME}
unset RANK WORLD_SIZE LOCAL_RANK
export {TRIAL_MARK}="$PWD"
export OMP_NUM_THREADS=1
export PYTHONUNBUFFERED="${{{{PYTHONUNBUFFERED:-1}}}}"
# Where the nodes' names are no host names, set MASTER_ADDR before moetune.
export MASTER_ADDR="${{{{MASTER_ADDR:-$(hostname)}}}}"
# Jobs that share a node, and runs of one job, need different ports.
export MASTER_PORT="$((20000 + (SLURM_JOB_ID * 7 + restarts) % 10000))"
timeout {{limit_s}} srun --ntasks-per-node=1 --cpus-per-task="${{{{SLURM_CPUS_PER_TASK:-1}}}}" \\
  --kill-on-bad-exit=1 bash -c {{start}}
code=$?
# A node that comes back ends every step of a job that it had before, the new ones too (137).
if ((code && code != {DEADLINE_EXIT})) && {{{{ ((code == 137 && restarts)) \\
  || ! timeout {PROBE_S} srun --ntasks-per-node=1 true; }}}}; then
  echo "a node of the job cannot be reached any more" >&2
  if ((restarts < {{most_restarts}})) && scontrol requeue "$SLURM_JOB_ID"; then
    sleep {PROBE_S}  # Slurm ends this run.
  fi
  code={LOST_NODE_EXIT}
fi
exit "$code"
"""
