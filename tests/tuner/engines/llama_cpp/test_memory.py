"""Predicted buffers against the logs of the engine."""

import json
from pathlib import Path

from tests.benchmarks.llama_buffers import STORED, compared, is_usual
from tests.rows import Failures

WORST_COMPUTE = 0.02


def test_buffers_are_those_of_the_engines_log(tmp_path: Path) -> None:
    logs = json.loads(STORED.read_text())
    assert len(logs) >= 20
    failures = Failures()
    for row in compared(tmp_path, logs):
        with failures.of(row):
            if row.kind != "compute":
                assert row.is_equal
            elif is_usual(row):
                assert row.error_ratio <= WORST_COMPUTE
    failures.check()
