import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("training_memory.py")
RUNS = SCRIPT.parents[3] / "shared" / "data" / "published" / "training_points_dev.csv"


def test_predicted_peaks_stay_near_published_ones() -> None:
    if not RUNS.exists():
        pytest.skip("the table of published runs does not lie beside the checkout")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(RUNS)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("|bf16") == 17
    assert "uncalibrated median" in done.stdout
    assert " of 50 warned of, " in done.stdout
    assert "largest gap of all" in done.stdout
