"""Real processes, tiny ones: how they end becomes a status, and none of them is left."""

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner.verify.testing import REPORT, launch_of, marked
from tuner.engines.reference.step_config import step_config
from tuner.goals.train_folder import read_plan
from tuner.verify import termination as ending
from tuner.verify.launcher import (
    LOG_NAME,
    REPORT_NAME,
    CommandRun,
    LaunchResult,
    launch_command,
    reference_result,
    steps_so_far,
    trial_command,
    trial_environment,
)

Run = Callable[..., LaunchResult]

TREE = """
import os, signal, subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);" \\
    "print('deaf', flush=True); time.sleep(600)"
child = subprocess.Popen(
    [sys.executable, "-S", "-c", deaf], start_new_session=True, stdout=subprocess.PIPE, text=True
)
print(child.stdout.readline(), end="", flush=True)
"""
"""A process with a grandchild of ours in its own session, which ignores a polite request to end."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run Python text as a trial in a folder of this test."""
    # What is printed must come in order, and at once, whatever this environment says.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)

    def ran(text: str, *, deadline_s: float = 60.0) -> LaunchResult:
        command = (sys.executable, "-S", "-c", text)
        return launch_command(command, folder=tmp_path, deadline_s=deadline_s)

    return ran


def test_a_report_is_read_back_and_the_log_kept(run: Run, tmp_path: Path) -> None:
    file = tmp_path / REPORT_NAME
    result = run(f"print('said'); open({str(file)!r}, 'w').write({REPORT.model_dump_json()!r})")
    assert result.status == "ok"
    assert result.report == REPORT
    assert result.reason == ""
    assert result.wall_s > 0.0
    assert (tmp_path / LOG_NAME).read_text() == "said\n"


def test_a_report_of_an_earlier_trial_is_not_taken_for_this_ones(run: Run, tmp_path: Path) -> None:
    (tmp_path / REPORT_NAME).write_text(REPORT.model_dump_json())
    result = run("pass")
    assert result.status == "crashed"
    assert result.reason == "the trial ended without a readable report"


@each_row("text", ["", "{", "[]", '{"schema_version": 2}'])
def test_an_unreadable_report_is_a_crash(run: Run, tmp_path: Path, text: str) -> None:
    result = run(f"open({str(tmp_path / REPORT_NAME)!r}, 'w').write({text!r})")
    assert (result.status, result.report) == ("crashed", None)


def test_the_last_error_is_the_reason_of_a_crash(run: Run) -> None:
    result = run("print('Error: an early one'); raise RuntimeError('shapes differ')")
    assert (result.status, result.reason) == ("crashed", "RuntimeError: shapes differ")
    assert run("raise SystemExit(5)").reason == "exit code 5"


def test_names_of_ranks_are_left_out_and_warnings_are_no_reason(run: Run) -> None:
    for printed, reason in {
        "[rank1]: ValueError: 8 != 4": "ValueError: 8 != 4",
        "(EngineCore_0 pid=7) ERROR 11-25 16:00:00 [core.py:9] torch.AcceleratorError: x": (
            "torch.AcceleratorError: x"
        ),
        "[rank0]: a.b.MyException: y\\ntorch.distributed.elastic.ChildFailedError: z": (
            "a.b.MyException: y"
        ),
        "WARNING 11-25 [x.py:3] ImportError: harmless\\nbye": "exit code 3: bye",
        "0: [rank0]: ValueError: 8 != 4": "ValueError: 8 != 4",
        "2026-01-02 - ERROR - ValueError: late\\nRuntimeError: failed. See root cause above.": (
            "ValueError: late"
        ),
        "See Error codes in the manual": "See Error codes in the manual",
    }.items():
        assert run(f"print('{printed}'); raise SystemExit(3)").reason == reason


@each_row(
    ("text", "reason"),
    [
        ("print('boom', 'why'); raise SystemExit(7)", "exit code 7: boom why"),
        ("print('boom\\n\\n \\t'); raise SystemExit(7)", "exit code 7: boom"),
        ("print('\\x1b[31mbo\\aom\\x1b[0m'); raise SystemExit(7)", "exit code 7: bo om"),
        ("import os; print('half', flush=True); os.kill(os.getpid(), 11)", "(SIGSEGV): half"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGRTMIN + 1)", "exit code -35"),
        ("print('x' * 5000); raise SystemExit(7)", "exit code 7: " + "x" * 287),
    ],
)
def test_without_an_error_the_last_words_are_the_reason(run: Run, text: str, reason: str) -> None:
    result = run(text)
    assert result.status == "crashed"
    assert result.reason.endswith(reason)
    assert result.reason.isprintable()


@each_row(
    ("text", "reason"),
    [
        ("raise SystemExit(77)", "a rank ran out of memory"),
        ("import os; os.kill(os.getpid(), 9)", "killed by the system"),
        ("print('x: rank 1 is out of memory: 4 GiB'); raise SystemExit(1)", "rank 1 is out of"),
        ("print('  exitcode  : 77 (pid: 7)'); raise SystemExit(1)", "ran out of memory"),
        ("print('  exitcode  : -9 (pid: 7)'); raise SystemExit(1)", "killed by the system"),
        # A shell's code for a command that was killed, behind a warning that speaks of an error.
        ("print('WARNING: ImportError: no triton'); raise SystemExit(137)", "killed by the system"),
    ],
)
def test_lack_of_memory_is_a_status_of_its_own(run: Run, text: str, reason: str) -> None:
    result = run(text)
    assert result.status == "out_of_memory"
    assert reason in result.reason
    assert len(result.reason.splitlines()) == 1


def test_a_flood_of_output_blocks_nothing_and_its_end_is_read(run: Run) -> None:
    result = run("print('x' * 5_000_000); raise RuntimeError('after the flood')")
    assert result.reason == "RuntimeError: after the flood"


def test_nothing_is_left_of_a_tree_that_hangs_and_does_not_listen(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "GRACE_S", 0.3)
    result = run(TREE + "time.sleep(600)", deadline_s=12.0)
    assert result.status == "timeout"
    assert result.reason == "no report after 12 s; the trial was ended"
    assert (tmp_path / LOG_NAME).read_text() == "deaf\n"
    assert not marked(tmp_path)


def test_a_grandchild_outlives_neither_a_crash_nor_a_kill_of_its_parent(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "GRACE_S", 0.3)
    assert run(TREE + "os.kill(os.getpid(), 9)").status == "out_of_memory"
    assert not marked(tmp_path)


def test_ctrl_c_leaves_no_process_behind(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "GRACE_S", 0.3)
    with pytest.raises(KeyboardInterrupt):
        run(TREE + "os.kill(os.getppid(), signal.SIGINT); time.sleep(600)")
    assert (tmp_path / LOG_NAME).read_text() == "deaf\n"
    assert not marked(tmp_path)


def test_the_environment_of_another_launcher_is_dropped_and_threads_are_pinned() -> None:
    outcome = trial_environment(
        {
            "RANK": "3",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "elsewhere",
            "MASTER_PORT": "1",
            "TORCHELASTIC_RUN_ID": "x",
            "MOETUNE_RENDEZVOUS": "/elsewhere",
            "MOETUNE_RENDEZVOUS_PARENT": "1",
            "OMP_NUM_THREADS": "16",
            "PATH": "/bin",
        }
    )
    assert outcome == {"PATH": "/bin", "OMP_NUM_THREADS": "1"}


def test_ranks_are_told_when_to_end_by_themselves(planned: Path, tmp_path: Path) -> None:
    plan = read_plan(planned)
    config = step_config(plan, present(plan.decision), steps=3, warmup_steps=1)
    command = trial_command(config, folder=tmp_path, deadline_s=60.0)
    assert command[1:4] == ("-P", "-m", "profilers.local_ranks")
    assert "--ranks=2" in command
    assert "--deadline=63" in command
    assert any(word.startswith("--parent=") for word in command)
    single = config.parallelism.model_copy(update={"data": 1, "expert": 1})
    alone = config.model_copy(update={"parallelism": single})
    assert "profilers.local_ranks" not in trial_command(alone, folder=tmp_path, deadline_s=1.0)


def test_only_a_clean_exit_asks_for_the_report(tmp_path: Path) -> None:
    (tmp_path / REPORT_NAME).write_text(json.dumps(json.loads(REPORT.model_dump_json())))
    for code, status in ((1, "crashed"), (0, "ok")):
        ran = CommandRun(exit_code=code, stopped="", wall_s=1.0)
        assert reference_result(ran, tmp_path, deadline_s=9.0, tail="").status == status


SLOW = """
import json, sys, time
with open("{folder}/progress.jsonl", "w", buffering=1) as lines:
    while True:
        lines.write('{{"step_s": 2.0}}\\n')
        lines.write('{{"step')
        time.sleep(600)
"""


def test_a_trial_that_is_hopeless_after_its_first_steps_is_ended(tmp_path: Path) -> None:
    seen: list[tuple[float, ...]] = []

    def hopeless(steps_s: Sequence[float]) -> str:
        seen.append(tuple(steps_s))
        return "slower than the best" if steps_s else ""

    command = (sys.executable, "-S", "-c", SLOW.format(folder=tmp_path))
    result = launch_command(command, folder=tmp_path, deadline_s=60.0, hopeless=hopeless)
    assert (result.status, result.reason) == ("ok", "slower than the best")
    # The line that is not whole yet is left for later.
    assert present(result.metrics).steps_s == seen[-1] == (2.0,)
    assert result.wall_s < 30.0
    assert not marked(tmp_path)


def test_steps_that_an_earlier_trial_told_do_not_end_this_one(run: Run, tmp_path: Path) -> None:
    (tmp_path / "progress.jsonl").write_text('{"step_s": 9.0}\n' * 5)
    run("pass")
    assert steps_so_far(tmp_path) == ()


@each_row("text", ["", "{}\n", "[]\n", '{"step_s": null}\n', "\xff\n", "5\n"])
def test_a_damaged_account_of_steps_says_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "progress.jsonl").write_text(text, encoding="latin-1")
    assert steps_so_far(tmp_path) == ()


def test_trials_are_held_to_the_memory_that_the_spec_states(planned: Path, tmp_path: Path) -> None:
    plan = read_plan(planned)
    stated = plan.cluster.pools[0].model_copy(
        update={"memory_per_device": 1000, "usable_memory_ratio": 0.9}
    )
    silent = stated.model_copy(update={"memory_per_device": None})
    limits = []
    for pool in (stated, silent):
        cluster = plan.cluster.model_copy(update={"pools": (pool,)})
        launch = replace(
            launch_of(planned, tmp_path), plan=plan.model_copy(update={"cluster": cluster})
        )
        limits.append(launch.step_config().memory_limit_bytes)
    assert limits == [900, None]
