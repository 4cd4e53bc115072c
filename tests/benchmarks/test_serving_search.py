import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.serving_search import cases, planned
from tests.patience import patient_s

ROOT = Path(__file__).parents[2]


def _check(one: dict[str, Any]) -> None:
    certificate = one["certificate"]
    assert certificate["status"] in ("optimal", "feasible"), one["name"]
    assert certificate["program_gap_ratio"] <= 1e-6, one["name"]
    assert 0.0 < certificate["bound"] <= certificate["objective"] * (1.0 + 1e-6), one["name"]
    assert one["devices"] > 0, one["name"]
    assert one["cpu_s"] > 0.0, one["name"]


@pytest.mark.slow
def test_a_deployment_is_searched_to_a_certificate(tmp_path: Path) -> None:
    (case,) = (one for one in cases() if one.name == "Mixtral on 16 H100, vLLM")
    _check(planned(case, folder=tmp_path, options=(), is_hidden=True))


@pytest.mark.slow
def test_all_deployments_are_searched_to_a_certificate_within_the_memory() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "benchmarks" / "serving_search.py"), "--json"],
        capture_output=True,
        text=True,
        timeout=patient_s(280),
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    searches = json.loads(done.stdout)["searches"]
    assert len({one["name"] for one in searches}) == 4
    for one in searches:
        _check(one)
        assert one["peak_bytes"] <= 400e6, one["name"]
