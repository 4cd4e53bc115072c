"""Runs trials by the user's own command: a template that is filled in for each decision.

    torchrun --nproc-per-node {world} pretrain_gpt.py {megatron_args} --train-iters {steps}
    bash {launch}/run.sh --training.steps {steps}
    ./train.sh --deepspeed_config {deepspeed_config} --out {metrics}

The template is split into arguments once, as a shell would (shlex), then filled in argument by
argument; no shell runs it. `{{` and `}}` are braces. Placeholders:

    launch             folder with the emitted files of the plan's program, made for this trial
    megatron_args      every argument of Megatron-LM, each an argument of its own
    torchtitan_args    `--module moetune_plan --config plan`; PYTHONPATH leads there
    deepspeed_config   the file deepspeed.json
    world, nodes, devices_per_node, steps (warm-up included), folder, port
    metrics            a file that the command may write its steps to; otherwise its output is read

If the plan was priced with recorded routing, records say that trials route by themselves: an
untrained router is more balanced.

Commands run one at a time, on this machine's network: torchrun's rendezvous listens on every
address of it without authentication, so keep other users away from `{port}`. Files of torchrun go
into the trial's folder.

A trial ends once enough steps were read, when it is hopeless, at its deadline or by itself; then
all of its processes on this machine are gone. Remote processes end with the command that started
them, as under srun and mpirun.

The log is read by an adapter of the engine, by the name that users type, one line at a time:
`read(line, job) -> Reading | None`. Lines are cut at MAX_LINE characters and logs at MAX_LOG_BYTES,
so no output takes long to read.

Not covered: deployments, which tuner/verify/deployments/ launches; several trials in parallel,
whose ports and devices are the user's.
"""

import shlex
import socket
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Final, cast

from tuner.engines.launchers.shape import launch_shape
from tuner.engines.metrics.interface import Adapter, TrialWork
from tuner.engines.metrics.regex import adapter as regex_adapter
from tuner.engines.registry import metrics_folders
from tuner.engines.targets import programs
from tuner.errors import SpecError
from tuner.plans.train import Plan
from tuner.verify.launcher import (
    COLOUR,
    LOG_NAME,
    EngineMetrics,
    Launch,
    LaunchResult,
    failure_result,
    log_tail,
    run_command,
    timeout_result,
    without_launcher,
)

ADAPTERS: Final[Mapping[str, str]] = {
    **{name: f"tuner.engines.{folder}.metrics" for name, folder in metrics_folders()},
    "jsonl": "tuner.engines.metrics.jsonl",
}
"""The module of each name, with its `read`."""

REGEX_PREFIX: Final = "regex:"
MAX_LINE: Final = 4096
MAX_LOG_BYTES: Final = 256 * 2**20
CHUNK_BYTES: Final = 2**20


def find_adapter(name: str) -> Adapter:
    """Return the adapter of a name, or of a regular expression after `regex:`.

    Raises:
        SpecError: neither.
    """
    if name.startswith(REGEX_PREFIX):
        return regex_adapter(name.removeprefix(REGEX_PREFIX))
    if name not in ADAPTERS:
        known = ", ".join(ADAPTERS)
        raise SpecError(f"--metrics {name!r} is not one of {known}, {REGEX_PREFIX}EXPRESSION")
    return cast(Adapter, import_module(ADAPTERS[name]).read)


class LogReader:
    """Reads a growing log; a resource with a position in the file."""

    def __init__(self, file: Path, *, adapter: Adapter, job: TrialWork) -> None:
        """Start at the beginning of a file that need not exist yet."""
        self._file = file
        self._adapter = adapter
        self._job = job
        self._offset = 0
        self._begun = b""
        self._steps_s: dict[int, float] = {}
        self._peak_bytes: int | None = None
        self._activation_bytes: tuple[int, ...] = ()

    def metrics(self, *, warmup_steps: int, most_steps: int) -> EngineMetrics:
        """Return the metrics so far, without the warm-up steps."""
        steps = sorted(self._steps_s)
        # An engine that prints every step from the third on (DeepSpeed) has done two warm-up steps
        # already; step numbers of a resumed job start anywhere.
        is_each = len(steps) < 2 or steps[1] == steps[0] + 1
        unprinted = steps[0] - 1 if steps and is_each and 1 <= steps[0] <= warmup_steps + 1 else 0
        timed = [self._steps_s[step] for step in steps[warmup_steps - unprinted :]]
        return EngineMetrics(
            steps_s=tuple(timed[:most_steps]),
            activation_bytes=self._activation_bytes,
            peak_bytes=self._peak_bytes,
        )

    def read_on(self, *, to_end: bool = False) -> None:
        """Read every complete line; with `to_end` also an unfinished last one."""
        if not self._file.is_file():
            return
        with self._file.open("rb") as stream:
            stream.seek(self._offset)
            while self._offset < MAX_LOG_BYTES and (chunk := stream.read(CHUNK_BYTES)):
                self._offset += len(chunk)
                *whole, begun = (self._begun + chunk).split(b"\n")
                # The rest of an overlong line is dropped.
                self._begun = begun[: MAX_LINE * 4]
                for line in whole:
                    self._take(line)
        if to_end:
            self._take(self._begun)
            self._begun = b""

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        text = line[: MAX_LINE * 4].decode("utf-8", errors="replace")
        reading = self._adapter(COLOUR.sub("", text)[:MAX_LINE], self._job)
        if reading is None:
            return
        if reading.samples_per_step:
            self._job = replace(self._job, samples_per_step=reading.samples_per_step)
        if reading.step_s is not None and reading.step_s > 0.0:
            step = len(self._steps_s) if reading.step is None else reading.step
            # Several ranks may print a step; the first line counts.
            self._steps_s.setdefault(step, reading.step_s)
        if reading.peak_bytes is not None:
            self._peak_bytes = max(self._peak_bytes or 0, reading.peak_bytes)
        self._activation_bytes = reading.activation_bytes or self._activation_bytes


METRICS_NAME: Final = "metrics.jsonl"
ENOUGH: Final = "enough steps were read"
OWN_LOADS: Final = "expert loads are the router's own, not the recorded ones"
PLACEHOLDERS: Final = (
    "launch",
    "megatron_args",
    "torchtitan_args",
    "deepspeed_config",
    "world",
    "nodes",
    "devices_per_node",
    "steps",
    "folder",
    "port",
    "metrics",
)
FILES: Final = {
    "megatron_args": "megatron_args.txt",
    "torchtitan_args": "moetune_plan.py",
    "deepspeed_config": "deepspeed.json",
}
"""Placeholders that need a file of one engine."""

LISTS: Final = frozenset({"megatron_args", "torchtitan_args"})
"""Placeholders that stand for several arguments, or none."""

SHORTEST_DEADLINE_S: Final = 600.0
"""Engines load libraries, build data sets and compile before their first step."""

MAX_TEMPLATE: Final = 65536

Part = tuple[str, str]
"""Text, and the placeholder behind it; empty where there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A command: its arguments, each a sequence of parts."""

    arguments: tuple[tuple[Part, ...], ...]

    @property
    def names(self) -> frozenset[str]:
        """Every placeholder in use."""
        return frozenset(name for parts in self.arguments for _, name in parts if name)


def parse_template(
    text: str,
    *,
    option: str = "--command",
    placeholders: Sequence[str] = PLACEHOLDERS,
    example: str = "bash {launch}/run.sh",
) -> Template:
    """Parse a template.

    Args:
        text: the template.
        option: the command-line option that holds it.
        placeholders: the allowed ones.
        example: for the error message.

    Raises:
        SpecError: a quote is open, a placeholder does not exist, or nothing is left to run.
    """
    if len(text) > MAX_TEMPLATE:
        raise SpecError(f"{option}: longer than {MAX_TEMPLATE} characters")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise SpecError(f"{option}: {error}") from error
    if not words:
        raise SpecError(f"{option} is needed, e.g. {option} '{example}'")
    return Template(
        arguments=tuple(_parts(word, option=option, placeholders=placeholders) for word in words)
    )


def _parts(word: str, *, option: str, placeholders: Sequence[str]) -> tuple[Part, ...]:
    try:
        parsed = list(string.Formatter().parse(word))
    except ValueError as error:
        raise SpecError(f"{option}: {word!r}: {error}; write {{{{ and }}}} for braces") from error
    parts = []
    for text, name, form, conversion in parsed:
        if name is not None and (name not in placeholders or form or conversion):
            known = ", ".join(placeholders)
            raise SpecError(f"{option}: {word!r}: {{{name}}} is none of the placeholders {known}")
        if name in LISTS and len(parsed) > 1:
            raise SpecError(f"{option}: {{{name}}} is several arguments; leave {word!r} to it")
        parts.append((text, name or ""))
    return tuple(parts)


def fill_template(template: Template, values: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the arguments of a trial."""
    arguments: list[str] = []
    for parts in template.arguments:
        if len(parts) == 1 and parts[0][1] in LISTS:
            arguments += [parts[0][0] + value for value in values[parts[0][1]]]
        else:
            arguments.append("".join(text + "".join(values.get(name, ())) for text, name in parts))
    return tuple(arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLauncher:
    """A `TrialLauncher` of the user's own command."""

    template: Template
    """The command."""
    adapter: Adapter
    """Reads its steps."""
    environment: Mapping[str, str]
    prepare: Callable[[Launch], None]
    """Writes the emitted files of a trial into `launch/` of its folder."""

    def __call__(self, launch: Launch) -> LaunchResult:
        """Run one trial.

        Raises:
            SpecError: the template asks for files of an engine that the plan is not for.
            EnvironmentMissingError: the command's program does not exist.
        """
        launch.folder.mkdir(parents=True, exist_ok=True)
        self.prepare(launch)
        values = trial_values(launch, names=self.template.names)
        command = fill_template(self.template, values)
        writes_metrics = "metrics" in self.template.names
        log = launch.folder / (METRICS_NAME if writes_metrics else LOG_NAME)
        reader = LogReader(log, adapter=self.adapter, job=_job(launch))

        def metrics() -> EngineMetrics:
            return reader.metrics(warmup_steps=launch.warmup_steps, most_steps=launch.steps)

        def watch() -> str:
            reader.read_on()
            steps_s = metrics().steps_s
            return ENOUGH if len(steps_s) >= launch.steps else launch.hopeless(steps_s)

        deadline_s = min(max(launch.deadline_s, SHORTEST_DEADLINE_S), launch.latest_s)
        (emitted,) = values["launch"]
        environment = _environment(self.environment, emitted, folder=launch.folder)
        ran = run_command(
            command,
            folder=launch.folder,
            deadline_s=deadline_s,
            environment=environment,
            watch=watch,
        )
        reader.read_on(to_end=True)
        tail = log_tail(launch.folder / LOG_NAME)
        if ran.exit_code is None and not ran.stopped:
            steps = len(metrics().steps_s)
            ended = timeout_result(deadline_s, wall_s=ran.wall_s, steps=steps)
            return (
                ended if steps else replace(ended, reason=ended.reason + _build_lock(environment))
            )
        if ran.exit_code:
            return failure_result(ran.exit_code, tail=tail, wall_s=ran.wall_s)
        measured = metrics()
        if not measured.steps_s:
            reason = (
                f"the command ended with code 0 and reported no step after the first"
                f" {launch.warmup_steps};"
                " does --metrics fit its output, and does it log every step (--log-interval 1,"
                " --metrics.log_freq 1, DeepSpeed's steps_per_print 1 with log_level info)?"
            )
            return LaunchResult(status="crashed", reason=reason, report=None, wall_s=ran.wall_s)
        stopped = "" if ran.stopped == ENOUGH else ran.stopped
        reason = "; ".join(filter(None, (stopped, _loads_note(launch.plan))))
        return LaunchResult(
            status="ok",
            reason=reason,
            report=None,
            wall_s=ran.wall_s,
            metrics=_fitting(measured, launch),
        )

    def stop(self) -> None:
        """Nothing to do: no other trial runs."""


def _build_lock(environment: Mapping[str, str]) -> str:
    """Name a lock of PyTorch's builds that a trial without a step may have waited for.

    A build that is killed, as with its trial, leaves its lock, and others wait for it endlessly
    (torch 2.13, utils/file_baton.py).
    """
    cache = environment.get("XDG_CACHE_HOME") or Path(environment.get("HOME", ""), ".cache")
    root = Path(environment.get("TORCH_EXTENSIONS_DIR") or Path(cache, "torch_extensions"))
    locks = sorted({*root.glob("*/lock"), *root.glob("*/*/lock")})
    return f"; if no build of PyTorch runs, remove {locks[0]}" if locks else ""


def _loads_note(plan: Plan) -> str:
    """Say that a trial routes by itself where its plan was priced with recorded loads."""
    routes_as_recorded = plan.goal.routing is None or programs(plan.emit).chosen[0] == "reference"
    return "" if routes_as_recorded else OWN_LOADS


def trial_values(launch: Launch, *, names: frozenset[str]) -> dict[str, tuple[str, ...]]:
    """Return the values of the placeholders in one trial.

    Raises:
        SpecError: a file that a placeholder in use needs was not emitted.
    """
    shape = launch_shape(launch.plan, launch.decision)
    folder = launch.folder.resolve()
    emitted = [folder / "launch" / program for program in programs(launch.plan.emit).chosen]
    needed = {
        placeholder: next((base / name for base in emitted if (base / name).is_file()), None)
        for placeholder, name in FILES.items()
    }
    for name in sorted(names & needed.keys()):
        if needed[name] is None:
            raise SpecError(
                f"--command: {{{name}}} has no file in a plan for {emitted[0].name}; name that"
                " engine under emit in the spec"
            )
    values = {
        "launch": str(_program_folder(emitted, needed, names=names)),
        "deepspeed_config": str(needed["deepspeed_config"]),
        "world": str(shape.num_devices),
        "nodes": str(shape.nodes),
        "devices_per_node": str(shape.devices_per_node),
        "steps": str(launch.warmup_steps + launch.steps),
        "folder": str(folder),
        "port": str(_free_port()),
        "metrics": str(folder / METRICS_NAME),
    }
    return {name: (value,) for name, value in values.items()} | {
        "megatron_args": _megatron_args(needed["megatron_args"]),
        "torchtitan_args": ("--module", "moetune_plan", "--config", "plan"),
    }


def _program_folder(
    emitted: Sequence[Path], needed: Mapping[str, Path | None], *, names: frozenset[str]
) -> Path:
    """Return the folder of the engine that the template names, else the first one's."""
    spoken_of = (needed[name] for name in needed if name in names)
    return next((file.parent for file in spoken_of if file is not None), emitted[0])


def _megatron_args(file: Path | None) -> tuple[str, ...]:
    """Return the words of the argument file, as the emitted run.sh does."""
    if file is None:
        return ()
    lines = file.read_text(encoding="utf-8").splitlines()
    return tuple(word for line in lines if not line.startswith("#") for word in line.split())


def _free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def _environment(environment: Mapping[str, str], emitted: str, *, folder: Path) -> dict[str, str]:
    paths = [emitted, *filter(None, [environment.get("PYTHONPATH")])]
    # torchrun would leave a folder in the temporary one.
    logs = {"PET_LOG_DIR": str(folder.resolve() / "torchrun")}
    return logs | without_launcher(environment) | {"PYTHONPATH": ":".join(paths)}


def _job(launch: Launch) -> TrialWork:
    goal = launch.plan.goal
    return TrialWork(
        num_devices=launch.decision.num_devices,
        samples_per_step=goal.global_batch_size,
        tokens_per_step=goal.global_batch_size * goal.sequence_length,
    )


def _fitting(measured: EngineMetrics, launch: Launch) -> EngineMetrics:
    """Drop activation bytes unless there is one number per pipeline rank."""
    if len(measured.activation_bytes) == launch.decision.pipeline_model_parallel_size:
        return measured
    return EngineMetrics(steps_s=measured.steps_s, peak_bytes=measured.peak_bytes)
