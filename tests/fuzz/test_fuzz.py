"""A sample of the mutations on every run, all of them under --slow; run.py states the checks."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patient_s

ROOT = Path(__file__).parents[2]
SEED = 22
MUTATIONS = 2000
SAMPLE = "0,3,7,14,19,25,33,43"
"""Quick mutations of different kinds."""


def _summary(*options: str, timeout_s: float) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.run", "--seed", str(SEED), *options],
        capture_output=True,
        text=True,
        timeout=patient_s(timeout_s),
        check=False,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_sample_of_spoilt_inputs_is_refused_in_one_line_or_read() -> None:
    result = _summary("--only", SAMPLE, timeout_s=250)
    assert result["finds"] == 0
    assert result["mutations"] == len(SAMPLE.split(","))
    assert result["codes"].get("2", 0) >= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_spoilt_input_crashes_hangs_fills_memory_or_steers_a_terminal() -> None:
    result = _summary("--sound", "--mutations", str(MUTATIONS), timeout_s=3500)
    assert result["finds"] == 0
    assert result["mutations"] == MUTATIONS
    # Not everything may be refused, or nothing would be tried but the first check.
    assert result["codes"]["0"] >= MUTATIONS // 20
