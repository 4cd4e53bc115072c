"""The user's own command: a small program that prints what an engine prints."""

import dataclasses
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profilers.local_ranks import RENDEZVOUS
from tests.expect import contains, present, refused
from tests.rows import each_row
from tests.tuner.cli.refusals import refusal
from tests.tuner.verify.testing import SILENT, launch_of, marked
from tuner import api
from tuner.errors import EnvironmentMissingError, PlanUnreadableError, SpecError
from tuner.goals.train_folder import read_plan, write_plan
from tuner.goals.verify import command_trials
from tuner.plans.folder import TRIALS_NAME
from tuner.verify.command import CommandLauncher, fill_template, find_adapter, parse_template
from tuner.verify.launcher import Launch
from tuner.verify.loop import HUNG
from tuner.verify.records import Verified, read_trials
from tuner.verify.verification import Effort

Spec = Callable[..., Path]

SEARCH = {"micro_batch_size": [1, 2], "tensor_model_parallel_size": [1]}

ENGINE = """
import sys
words = sys.argv[1:]
size = int(words[words.index("--micro-batch-size") + 1])
steps = int(words[words.index("--train-iters") + 1])
for step in range(1, steps + 1):
    time_ms = (900.0 if step < 3 else 100.0 / size) + step * 0.01
    print(f" iteration {step}/ {steps} | elapsed time per iteration (ms): {time_ms} |")
print("[Rank 0] memory (MB) | allocated: 1.0 | max allocated: 2.0 |")
"""
"""A pretrain_gpt.py whose larger micro-batches are faster, after two slow steps."""


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    file = tmp_path / "pretrain gpt.py"
    file.write_text(ENGINE)
    return file


def _verify(folder: Path, command: str, *, metrics: str = "megatron", **effort: Any) -> Verified:
    return api.verify(
        folder,
        effort=Effort(**({"trials": 3, "steps": 4} | effort)),
        resume=False,
        watcher=SILENT,
        by=command_trials(command=command, metrics=metrics),
    )


def _command(engine: Path, rest: str = "{megatron_args} --train-iters {steps}") -> str:
    return f"{sys.executable} -S '{engine}' {rest}"


def test_a_plan_on_datasheets_is_verified_by_its_own_engine(
    datasheet_plan: Path, engine: Path
) -> None:
    outcome = _verify(datasheet_plan, _command(engine))
    plan = read_plan(datasheet_plan)
    assert [trial.status for trial in outcome.trials] == ["ok"] * 3
    assert outcome.trials[0].decision == plan.decision
    for trial in outcome.trials:
        # 100 ms over the micro-batch; steps 3 to 6 are timed, median of .03 .04 .05 .06 ms more.
        size = trial.decision.micro_batch_size
        assert trial.measured_step_s == pytest.approx((100.0 / size + 0.045) / 1000.0)
        assert trial.measured_activation_bytes == ()
        assert trial.predicted_step_s > 0.0
    assert outcome.winner is not None
    assert outcome.winner.micro_batch_size == max(
        trial.decision.micro_batch_size for trial in outcome.trials
    )
    assert outcome.accuracy.activation_max_ape is None
    assert outcome.accuracy.predicted_median_ape is not None
    assert present(outcome.residual).engine == "megatron-lm"
    records = read_trials(datasheet_plan / TRIALS_NAME)
    assert {record.measured_peak_bytes for record in records} == {2 * 2**20}
    text = (datasheet_plan / "launch/megatron-lm/megatron_args.txt").read_text()
    assert f"--micro-batch-size {outcome.winner.micro_batch_size}\n" in text
    assert "NOT VERIFIED" not in text


@each_row(
    "line", ['{"step_s": 0.5, "activation_bytes": -5}', '{"step_s": 1e300}', '{"step_s": 5e-324}']
)
def test_numbers_that_cannot_be_spoil_their_own_trial_alone(
    datasheet_folder: Path, tmp_path: Path, line: str
) -> None:
    folder = Path(shutil.copytree(datasheet_folder, tmp_path / f"plan of {line}"))
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib\n"
        "begun = pathlib.Path(__file__).with_suffix('.begun')\n"
        f"line = '{{\"step_s\": 0.5}}' if begun.exists() else {line!r}\n"
        "begun.touch()\n"
        "print(*[line] * 9, sep='\\n')\n"
    )
    outcome = _verify(folder, f"{sys.executable} -S {program}", metrics="jsonl")
    assert [trial.status for trial in outcome.trials] == ["crashed", "ok", "ok"]
    program.with_suffix(".begun").unlink()


@each_row(
    ("target", "placeholder", "given"),
    [
        ("deepspeed", "{deepspeed_config}", "deepspeed.json"),
        ("torchtitan", "{launch}/torchtitan.toml {torchtitan_args}", "torchtitan.toml"),
        ("megatron-lm", "{launch}/run.sh {nodes} {world} {devices_per_node}", "run.sh"),
    ],
)
def test_each_engine_finds_its_files(
    tiny_spec: Spec,
    datasheet_folder: Path,
    tmp_path: Path,
    target: str,
    placeholder: str,
    given: str,
) -> None:
    folder = tmp_path / target
    if target == "megatron-lm":
        shutil.copytree(datasheet_folder, folder)
    else:
        pool = {"profile": None, "device": "H200", "memory_per_device": None}
        made = api.plan(tiny_spec(pool=pool, search=SEARCH, emit=(target,)))
        write_plan(folder, made.plan, spec=made.spec, profiles=made.profiles)
    program = tmp_path / "program.py"
    program.write_text(
        "import os, pathlib, sys\n"
        "file = pathlib.Path(sys.argv[1])\n"
        f"assert file.name == {given!r} and file.is_file(), 'Error: no file'\n"
        "assert str(file.parent) in os.environ['PYTHONPATH'].split(':'), 'Error: no path'\n"
        "print('{\"step_s\": 1.0}\\n' * 6)\n"
    )
    outcome = _verify(
        folder, f"{sys.executable} -S {program} {placeholder}", metrics="jsonl", trials=1
    )
    assert [(trial.status, trial.reason) for trial in outcome.trials] == [("ok", "")]


def test_trials_of_a_plan_on_recorded_routing_say_that_they_route_by_themselves(
    tiny_spec: Spec, tmp_path: Path, engine: Path
) -> None:
    counts = [[30, 20, 10, 10, 10, 10, 5, 5]] * 4
    record = {"num_logical_experts": 8, "layer_ids": [0, 1, 2, 3], "logical_count": counts}
    (tmp_path / "routing.json").write_text(json.dumps(record))
    made = api.plan(
        tiny_spec(
            pool={"profile": None, "device": "H200", "memory_per_device": None},
            goal={"routing": {"path": "routing.json"}},
            search=SEARCH,
            emit=("megatron-lm",),
        )
    )
    folder = tmp_path / "plan"
    write_plan(folder, made.plan, spec=made.spec, profiles=made.profiles)
    (trial,) = _verify(folder, _command(engine), trials=1).trials
    assert trial.status == "ok"
    assert trial.reason == "expert loads are the router's own, not the recorded ones"


def test_nothing_but_what_the_plan_names_is_launched(datasheet_plan: Path, engine: Path) -> None:
    outcome = _verify(datasheet_plan, _command(engine), trials=60)
    plan = read_plan(datasheet_plan)
    named = {plan.decision, *(other.decision for other in plan.runners_up)}
    assert {trial.decision for trial in outcome.trials} == named
    assert len(outcome.trials) == len(named)


def test_decisions_that_the_targets_refuse_are_one_line(datasheet_plan: Path, engine: Path) -> None:
    file = datasheet_plan / "plan.json"
    whole = json.loads(file.read_text(encoding="utf-8"))
    for place in (whole, whole["alternatives"][0]):
        kept = dict(place["decision"])
        place["decision"]["mtp_num_layers"] = 1_000_000
        file.write_text(json.dumps(whole), encoding="utf-8")
        with pytest.raises(PlanUnreadableError, match=r"plan\.json.*mtp.*write the plan anew"):
            _verify(datasheet_plan, _command(engine))
        place["decision"] = kept


def test_the_command_line_says_which_launcher_a_datasheet_plan_needs(
    datasheet_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refusal(capsys, ["verify", datasheet_plan])
    assert "launch its engine with --launcher command" in line


@each_row(
    ("options", "said"),
    [
        (["--launcher", "command"], "--command is needed"),
        (["--launcher", "command", "--command", "a {b}"], "{b} is none of the placeholders"),
        (["--launcher", "command", "--command", "a", "--metrics", "b"], "'b' is not one of"),
        (["--command", "a"], "--command is for --launcher command; add that, or leave it out"),
        (["--command", "a", "--metrics", "b"], "--command and --metrics are for --launcher comma"),
        (["--slurm", "a=b"], "--slurm is for --launcher slurm"),
        (["--slurm-wait", "24h"], "--slurm-wait is for --launcher slurm; add that, or leave it"),
        (["--no-requeue"], "--no-requeue is for --launcher slurm"),
        (["--launcher", "command", "--requeue"], "--requeue is for --launcher slurm"),
        (
            ["--slurm", "a=b", "--no-requeue", "--slurm-wait", "1h"],
            "--slurm, --slurm-wait and --no-requeue are for --launcher slurm; add that, or leave "
            "them out",
        ),
        (["--runs", "3"], "--runs is for plans that serve; leave it out"),
        (["--start-limit", "30min", "--url", "x"], "--url and --start-limit are for plans that s"),
        (["--parallel", "2"], "only jobs of Slurm run side by side"),
    ],
)
def test_options_that_do_not_fit_are_one_line(
    datasheet_plan: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str
) -> None:
    assert said in refusal(capsys, ["verify", datasheet_plan, *options])


def test_templates_are_split_like_a_shell_and_filled_argument_by_argument() -> None:
    template = parse_template("run 'two words' --out={folder}/x {megatron_args} '{{}}' {port}")
    values = {
        "folder": ("/tmp/a b; rm -rf $HOME",),
        "megatron_args": ("--bf16", "--seq-length", "64"),
        "port": ("1",),
    }
    assert fill_template(template, values) == (
        "run",
        "two words",
        "--out=/tmp/a b; rm -rf $HOME/x",
        "--bf16",
        "--seq-length",
        "64",
        "{}",
        "1",
    )


@each_row(
    ("text", "said"),
    [
        ("", "is needed"),
        ("run 'open", "No closing quotation"),
        ("run {", "write {{ and }} for braces"),
        ("run {folder!r}", "none of the placeholders"),
        ("run {folder:>9}", "none of the placeholders"),
        ("run {folder.parent}", "none of the placeholders"),
        ("run x{megatron_args}{port}", "is several arguments"),
        ("run " + "x" * 70_000, "longer than 65536"),
    ],
)
def test_a_template_that_cannot_be_filled_is_refused(text: str, said: str) -> None:
    with refused(SpecError, said):
        parse_template(text)


@pytest.fixture
def launch(planned: Path, tmp_path: Path) -> Launch:
    return launch_of(planned, tmp_path / "trial")


def _launcher(text: str, metrics: str = "jsonl") -> CommandLauncher:
    code = shlex.quote(text.replace("{", "{{").replace("}", "}}"))
    return CommandLauncher(
        template=parse_template(f"{sys.executable} -S -u -c {code} " + "{metrics}"),
        adapter=find_adapter(metrics),
        environment=os.environ | {"RANK": "3", "WORLD_SIZE": "9", RENDEZVOUS: "/stray/meet"},
        prepare=lambda _launch: None,
    )


FOREVER = """
import os, sys, time
with open(sys.argv[1], "w", buffering=1) as told:
    for step in range(99):
        print('{"step_s": %s, "activation_bytes": [5]}' % (9 if step < 2 else 2 + step / 1000),
              file=told)
        time.sleep(0.02)
time.sleep(600)
"""


def test_a_command_that_goes_on_is_ended_when_enough_steps_are_known(launch: Launch) -> None:
    result = _launcher(FOREVER)(launch)
    assert (result.status, result.reason) == ("ok", "")
    assert result.metrics is not None
    assert result.metrics.steps_s == (2.002, 2.003, 2.004)
    assert result.metrics.activation_bytes == (5,)
    assert not marked(launch.folder)


def test_a_hopeless_trial_is_ended_and_keeps_what_it_has_measured(launch: Launch) -> None:
    patient = dataclasses.replace(
        launch, steps=100, hopeless=lambda steps: f"{len(steps) > 3}" if len(steps) > 3 else ""
    )
    result = _launcher(FOREVER)(patient)
    assert (result.status, result.reason) == ("ok", "True")
    assert 3 < len(present(result.metrics).steps_s) <= 97


def test_what_a_failed_trial_printed_is_kept(datasheet_plan: Path, tmp_path: Path) -> None:
    program = tmp_path / "fails.py"
    program.write_text(
        "import pathlib, sys\n"
        "log = pathlib.Path(sys.argv[1]) / 'logs' / 'rank.log'\n"
        "log.parent.mkdir()\n"
        "log.write_text('the cause')\n"
        "raise RuntimeError(f'see {log}')\n"
    )
    command = f"{shlex.quote(sys.executable)} {shlex.quote(str(program))} {{folder}}"
    outcome = _verify(datasheet_plan, command, trials=1)
    assert [trial.reason for trial in outcome.trials] == ["RuntimeError: see logs/rank.log"]
    kept = (datasheet_plan / TRIALS_NAME / "0000.log").read_text()
    contains(kept, "== logs/rank.log\nthe cause", "== log.txt\nTraceback")


def test_ends_without_steps_have_a_reason(launch: Launch) -> None:
    silent = _launcher("print('nothing')")(launch)
    assert silent.status == "crashed"
    assert "does --metrics fit its output, and does it log every step" in silent.reason
    failed = _launcher("raise RuntimeError('no data set')")(launch)
    assert (failed.status, failed.reason) == ("crashed", "RuntimeError: no data set")
    full = _launcher("raise MemoryError('torch.OutOfMemoryError: CUDA out of memory.')")(launch)
    assert full.status == "out_of_memory"


def test_a_trial_that_waits_for_a_killed_build_names_its_lock(
    launch: Launch, tmp_path: Path
) -> None:
    lock = tmp_path / "builds" / "py311_cpu" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    waits = dataclasses.replace(
        _launcher("import time; time.sleep(60)"),
        environment={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "builds")},
    )
    short = dataclasses.replace(launch, latest_s=0.5)
    assert str(lock) not in waits(short).reason
    lock.touch()
    ended = waits(short)
    assert ended.status == "timeout"
    assert ended.reason.endswith(f"if no build of PyTorch runs, remove {lock}")
    assert HUNG.match(ended.reason)


def test_ranks_of_a_surrounding_launcher_are_not_handed_on(launch: Launch) -> None:
    code = (
        f"import os; assert not {{'RANK', {RENDEZVOUS!r}}} & {{*os.environ}}, 'Error: has a rank'"
    )
    assert "reported no step" in _launcher(code)(launch).reason


def test_a_program_that_does_not_exist_is_named(launch: Launch) -> None:
    launcher = CommandLauncher(
        template=parse_template("no-such-program"),
        adapter=find_adapter("jsonl"),
        environment=os.environ,
        prepare=lambda _launch: None,
    )
    with pytest.raises(EnvironmentMissingError, match="no-such-program: No such file"):
        launcher(launch)


def test_an_engine_that_the_plan_is_not_for_is_said(launch: Launch) -> None:
    launcher = CommandLauncher(
        template=parse_template("run {deepspeed_config}"),
        adapter=find_adapter("jsonl"),
        environment=os.environ,
        prepare=lambda _launch: None,
    )
    with pytest.raises(SpecError, match=r"\{deepspeed_config\} has no file in a plan for"):
        launcher(launch)
