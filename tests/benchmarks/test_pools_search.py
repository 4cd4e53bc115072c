import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient_s


# Smaller pools are searched by tests/tuner/search/train/pools.
@pytest.mark.slow
def test_a_large_cluster_of_two_kinds_is_searched_to_a_certificate() -> None:
    script = Path(__file__).with_name("pools_search.py")
    done = subprocess.run(
        [sys.executable, str(script), "--json", "--seconds", "60"],
        capture_output=True,
        text=True,
        timeout=patient_s(280),
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["devices"] == 1024
    assert 0.0 <= report["gap_ratio"] <= 0.01
