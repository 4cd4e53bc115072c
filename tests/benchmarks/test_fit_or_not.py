"""The stored trials near their limit, judged by what is predicted of them today; one runs anew."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fit_or_not.py")
FOLDER = Path(__file__).parents[2] / "examples/profiles/fit-or-not"
STORED = FOLDER / "trials.jsonl"


def _judged(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), str(file), *options],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("name", ["trials.jsonl", "hold-out.jsonl", "hold-out-2.jsonl"])
def test_what_is_predicted_to_fit_has_fitted_and_little_else(name: str) -> None:
    done = _judged(FOLDER / name, "--trials", "0")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    counts = [int(word) for word in re.findall(r"fit +(\d+) +(\d+)$", done.stdout, re.M)[0]]
    assert counts[0] > 40
    assert counts[1] == 0
    assert sum(map(int, re.findall(r"fit +(\d+) +\d+$", done.stdout, re.M))) > 50
    assert sum(map(int, re.findall(r"fit +\d+ +(\d+)$", done.stdout, re.M))) > 40
    assert len((FOLDER / name).read_text(encoding="utf-8").splitlines()) >= 100


@pytest.mark.parametrize(
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
    tmp_path: Path, changed: dict[str, object], code: int
) -> None:
    row = json.loads(STORED.read_text(encoding="utf-8").splitlines()[0])
    assert row["status"] == "ok"
    file = tmp_path / "trials.jsonl"
    file.write_text(json.dumps(row | changed) + "\n", encoding="utf-8")
    done = _judged(file, "--trials", "0")
    assert done.returncode == code, done.stdout + done.stderr[-2000:]


def test_a_file_without_trials_is_not_judged(tmp_path: Path) -> None:
    done = _judged(tmp_path / "mistyped.jsonl", "--trials", "0")
    assert done.returncode == 2
    assert "holds no trials to judge" in done.stderr


@pytest.mark.slow
def test_a_trial_far_below_its_peak_runs_out_of_memory(tmp_path: Path) -> None:
    done = _judged(tmp_path / "trials.jsonl", "--trials", "1", "--factors", "0.3", "0.301")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert re.search(r"predicted not to fit +0 +1$", done.stdout, re.M)
