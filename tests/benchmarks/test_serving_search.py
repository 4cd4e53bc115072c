import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_deployments_are_searched_to_a_certificate_within_the_memory() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "benchmarks" / "serving_search.py"), "--json"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    searches = json.loads(done.stdout)["searches"]
    assert len({one["name"] for one in searches}) == 4
    for one in searches:
        certificate = one["certificate"]
        assert certificate["status"] in ("optimal", "feasible"), one["name"]
        assert certificate["program_gap_ratio"] <= 1e-6, one["name"]
        assert 0.0 < certificate["bound"] <= certificate["objective"] * (1.0 + 1e-6), one["name"]
        assert one["devices"] > 0, one["name"]
        assert one["peak_bytes"] <= 400e6, one["name"]
        assert one["cpu_s"] > 0.0, one["name"]
