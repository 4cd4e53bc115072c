import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.strategy_search import question_of, searched
from tests.patience import patient_s


def test_a_space_of_64_devices_is_searched_to_a_certificate() -> None:
    _, one = searched(question_of("qwen3-30b-a3b", "h100-sxm", nodes=8, batch=256))
    assert one["status"] in ("optimal", "feasible")
    assert 0.0 <= one["gap_ratio"] <= 0.01
    assert one["decisions"] > 1e6


@pytest.mark.slow
def test_whole_spaces_are_searched_to_a_certificate_in_little_memory() -> None:
    script = Path(__file__).with_name("strategy_search.py")
    done = subprocess.run(
        [sys.executable, str(script), "--json"],
        capture_output=True,
        text=True,
        timeout=patient_s(280),
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)

    assert [one["devices"] for one in report["searches"]] == [2048, 512, 128]
    for one in (*report["searches"], *report["growth"]):
        assert one["status"] in ("optimal", "feasible")
        assert 0.0 <= one["gap_ratio"] <= 0.01
        assert one["peak_rss_bytes"] <= 1e9
    # Sixty times as many decisions must not take sixty times as long.
    first, last = report["growth"][0], report["growth"][-1]
    assert last["cpu_s"] / first["cpu_s"] < last["decisions"] / first["decisions"]
    assert report["pricing"]["decisions"] >= 200_000
