import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from profilers.records import Case, Measurement
from profilers.store import write_profile
from tests.profilers.testing import fake_profile
from tests.rows import each_row
from tests.tuner.cli.refusals import Captured, output, refusal
from tuner.cli import app as frame
from tuner.regress.records import Check

CHECKOUT = Path(__file__).parents[3]
BROKEN = "goal: {kind: fly}\n"


def profile(folder: Path, factor: float) -> Path:
    """Copies of ten sizes, five repeats each."""
    cases = [Case(operation="copy", kind="device", axes={"bytes": 2**n}) for n in range(10, 20)]
    rows = [
        Measurement(
            case=case,
            times_s=tuple(factor * case.axes["bytes"] * 1e-9 * (1.0 + 0.01 * n) for n in range(5)),
        )
        for case in cases
    ]
    write_profile(folder, fake_profile(rows))
    return folder


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """A profile, and one of the same machine that is a tenth slower."""
    return str(profile(tmp_path / "old", 1.0)), str(profile(tmp_path / "new", 1.1))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Checks whose only scenario cannot be planned."""
    (tmp_path / "checks" / "flies").mkdir(parents=True)
    (tmp_path / "checks" / "flies" / "spec.yaml").write_text(BROKEN)
    return tmp_path / "checks"


def test_a_slower_profile_exits_1_and_says_which_operation(
    pair: tuple[str, str], capsys: Captured
) -> None:
    old, new = pair
    text = output(capsys, ["check", "--profile", new, "--baseline", old], code=1)
    assert "copy device: 10 % slower over its 10 cases, significantly" in text
    assert text.endswith("FAILED: 1 regression\n")
    assert "passed: 1 better" in output(capsys, ["check", "--profile", old, "--baseline", new])


def test_json_is_the_stored_type_with_the_contract_s_fields(
    pair: tuple[str, str], capsys: Captured
) -> None:
    old, new = pair
    text = output(capsys, ["check", "--profile", new, "--baseline", old, "--json"], code=1)
    (scenario,) = json.loads(text)["scenarios"]
    assert {"name", "verdict", "reason"} <= scenario.keys()
    assert scenario["verdict"] == "regression"
    assert Check.model_validate_json(text).failed


def test_a_scenario_that_cannot_be_read_exits_1(broken: Path, capsys: Captured) -> None:
    assert "goal.kind 'fly' is not one of" in output(capsys, ["check", broken], code=1)


@each_row(
    ("arguments", "words"),
    [
        ([], "CHECKS is missing"),
        (["absent"], "no such folder"),
        (["absent", "--profile", "x"], "--profile and --baseline belong together"),
        (["absent", "--update", "--against", "git:HEAD"], "--update accepts plans of CHECKS"),
        (["absent", "--time-limit", "5"], "--time-limit"),
        (["absent", "--memory-limit", "much"], "--memory-limit"),
        (["absent", "--tolerance", "-1"], "--tolerance"),
    ],
)
def test_unusable_input_exits_2_in_one_line(
    arguments: list[str], words: str, capsys: Captured
) -> None:
    assert words in refusal(capsys, ["check", *arguments])


def test_files_for_ci_are_written(broken: Path, tmp_path: Path, capsys: Captured) -> None:
    junit, summary = tmp_path / "out" / "j.xml", tmp_path / "m.md"
    frame.run(["check", str(broken), "--junit", str(junit), "--markdown", str(summary)])
    assert ElementTree.parse(junit).getroot().get("errors") == "1"
    assert "| flies | **error** |" in summary.read_text()
    assert capsys.readouterr().err == ""


def test_github_is_told_on_stderr_and_in_its_summary(
    broken: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    assert frame.run(["check", str(broken), "--json"]) == 1
    said = capsys.readouterr()
    json.loads(said.out)
    (line,) = said.err.splitlines()
    assert line.startswith(f"::error file={broken}/flies/spec.yaml,title=moetune check%3A flies")
    assert summary.read_text().startswith("before\n## moetune check: failed")


def test_nothing_in_the_table_is_a_command_to_github(
    broken: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = 'goal: {kind: "\\u001b[31m\\n::add-mask::x ##[error]y"}\n'
    (broken / "::error::z").mkdir()
    (broken / "::error::z" / "spec.yaml").write_text(spec)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    lines = output(capsys, ["check", broken], code=1).splitlines()
    word = lines[0].removeprefix("::stop-commands::")
    assert len(word) == 32
    assert lines[-1] == f"::{word}::"
    assert sum(line.startswith("  ::error::z") for line in lines) == 1
    assert not any("\x1b" in line or line.startswith("::add-mask") for line in lines)


def test_a_summary_that_cannot_be_written_changes_no_verdict(
    broken: Path, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "absent" / "summary.md"))
    assert frame.run(["check", str(broken)]) == 1
    said = capsys.readouterr()
    assert said.out.endswith("FAILED: 1 error\n")
    assert said.err == "moetune: GITHUB_STEP_SUMMARY: No such file or directory\n"


def test_verdicts_are_told_before_a_file_fails_to_be_written(
    broken: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "file").write_text("")
    assert frame.run(["check", str(broken), "--junit", str(tmp_path / "file" / "j.xml")]) == 3
    said = capsys.readouterr()
    assert said.out.endswith("FAILED: 1 error\n")
    (line,) = said.err.splitlines()
    assert "cannot write" in line


def test_the_schema_is_published(capsys: Captured) -> None:
    schema = json.loads(output(capsys, ["schema", "check"]))
    scenario = schema["$defs"]["ScenarioResult"]["properties"]
    assert schema["$defs"][scenario["verdict"]["$ref"].rpartition("/")[2]]["enum"] == [
        "pass",
        "better",
        "drift",
        "regression",
        "incomparable",
        "missing",
        "error",
    ]


def test_ctrl_c_exits_130_and_leaves_no_process(tmp_path: Path) -> None:
    scenario = tmp_path / "checks" / "long"
    scenario.mkdir(parents=True)
    text = (CHECKOUT / "examples/worked/mixtral-8x7b-64-a100/spec.yaml").read_text()
    (scenario / "spec.yaml").write_text(text.replace("../../", f"{CHECKOUT}/examples/"))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "tuner", "check", str(scenario.parent)],
        env={**os.environ, "PYTHONPATH": str(CHECKOUT)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    started = _awaited(lambda: psutil.Process(process.pid).children(recursive=True))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive


def _awaited(look: Callable[[], list[psutil.Process]]) -> list[psutil.Process]:
    """Look until there is something to see."""
    end_s = time.monotonic() + 60.0
    while time.monotonic() < end_s:
        result = look()
        if result:
            return result
        time.sleep(0.02)
    raise AssertionError("no process was started")
