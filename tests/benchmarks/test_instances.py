import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from solvers.instances.problem import InstanceObjective
from tests.benchmarks.instances import solved
from tests.patience import patient_s
from tests.rows import each_row


@each_row("max_kinds", [None, 1])
def test_a_mixed_pool_is_solved_to_optimality(max_kinds: int | None) -> None:
    one = solved(InstanceObjective.COST, max_kinds=max_kinds, seed=0, time_limit_s=100.0)
    assert (one["status"], one["columns"]) == ("optimal", 306)
    assert one["gap_ratio"] <= 1e-6


@pytest.mark.slow
def test_a_mixed_pool_is_solved_to_optimality_for_every_objective() -> None:
    script = Path(__file__).with_name("instances.py")
    done = subprocess.run(
        [sys.executable, str(script), "--json", "--time-limit", "100"],
        capture_output=True,
        text=True,
        timeout=patient_s(280),
        check=False,
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PYTHONWARNINGS": "default",
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert len(report["solves"]) == 6
    for one in report["solves"]:
        assert one["status"] == "optimal"
        assert one["gap_ratio"] <= 1e-6
        assert one["columns"] == 306
    assert all(band["plans"] >= 1 for band in report["ties"])
