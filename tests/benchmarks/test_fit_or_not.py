"""The stored trials near their limit, compared with today's predictions; one is run again."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.benchmarks.fit_or_not import main
from tests.patience import patient_s
from tests.rows import each_row

FOLDER = Path(__file__).parents[2] / "examples/profiles/fit-or-not"
STORED = FOLDER / "trials.jsonl"

Judge = Callable[..., tuple[int, str]]


@pytest.fixture
def judge(capsys: pytest.CaptureFixture[str]) -> Judge:
    """Evaluate the trials of a file: judge(file, *options) -> exit code and output."""

    def run(file: Path, *options: str) -> tuple[int, str]:
        code = main([str(file), *options])
        return code, capsys.readouterr().out

    return run


@each_row("name", ["trials.jsonl", "hold-out.jsonl", "hold-out-2.jsonl"])
def test_what_is_predicted_to_fit_has_fitted_and_little_else(judge: Judge, name: str) -> None:
    code, said = judge(FOLDER / name, "--trials", "0")
    assert code == 0, said
    counts = [int(word) for word in re.findall(r"fit +(\d+) +(\d+)$", said, re.M)[0]]
    assert counts[0] > 40
    assert counts[1] == 0
    assert sum(map(int, re.findall(r"fit +(\d+) +\d+$", said, re.M))) > 50
    assert sum(map(int, re.findall(r"fit +\d+ +(\d+)$", said, re.M))) > 40
    assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) >= 100


@each_row(
    ("changed", "code"),
    [
        ({}, 0),
        ({"status": "crashed", "reason": "shapes differ"}, 1),
        # A third of what the trial needs, and yet it is said to have run; and the other way round.
        ({"limit_bytes": 10**8, "status": "ok"}, 1),
        ({"limit_bytes": 10**12, "status": "out_of_memory"}, 1),
    ],
)
def test_a_trial_that_is_off_ends_the_judgement_with_one(
    tmp_path: Path, judge: Judge, changed: dict[str, object], code: int
) -> None:
    row = json.loads(STORED.read_text(encoding="utf-8").splitlines()[0])
    assert row["status"] == "ok"
    file = tmp_path / "trials.jsonl"
    file.write_text(json.dumps(row | changed) + "\n", encoding="utf-8")
    result, said = judge(file, "--trials", "0")
    assert result == code, said


def test_a_file_without_trials_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path / "mistyped.jsonl"), "--trials", "0"])
    assert ended.value.code == 2
    assert "holds no trials to judge" in capsys.readouterr().err


@pytest.mark.slow
def test_a_trial_far_below_its_peak_runs_out_of_memory(tmp_path: Path) -> None:
    # Ranks are forked from the process of the program.
    script = Path(__file__).with_name("fit_or_not.py")
    options = ("--trials", "1", "--factors", "0.3", "0.301")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "trials.jsonl"), *options],
        capture_output=True,
        text=True,
        timeout=patient_s(200),
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert re.search(r"predicted not to fit +0 +1$", done.stdout, re.M)
