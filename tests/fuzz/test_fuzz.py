"""A sample of the mutations on every run, all of them under --slow; run.py states the checks."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fuzz.inputs import build
from tests.fuzz.run import main

MUTATIONS = 2000
SAMPLE = "0,3,7,14,18,25,33,43"
"""Quick mutations of different kinds, none of which needs PyTorch or a deployment's plan."""


def _summary(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    code = main(["--seed", "22", *options])
    printed = capsys.readouterr().out
    assert code == 0, printed[-6000:]
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    assert result["finds"] == 0
    return result


def test_a_sample_of_spoilt_inputs_is_refused_in_one_line_or_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path, recordings=("sglang-json", "npy"), goals=("train",))
    result = _summary(capsys, "--only", SAMPLE, "--base", str(tmp_path))
    assert result["mutations"] == len(SAMPLE.split(","))
    assert result["codes"].get("2", 0) >= 3


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_spoilt_input_crashes_hangs_fills_memory_or_steers_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    result = _summary(capsys, "--sound", "--mutations", str(MUTATIONS))
    assert result["mutations"] == MUTATIONS
    # Not everything may be refused, or nothing would be tried but the first check.
    assert result["codes"]["0"] >= MUTATIONS // 20
