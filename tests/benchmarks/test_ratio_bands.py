import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("ratio_bands.py")
RUNS = SCRIPT.parents[1] / "tuner" / "backtest" / "runs.csv"


def test_every_figure_is_printed_or_said_to_be_missing() -> None:
    # The small table has pairs in too few settings for any band, so that nothing is held.
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(RUNS)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert "single times on Hopper with experts: nothing to measure" in done.stdout
    assert "all rows with experts: " in done.stdout
    assert "pairs, " in done.stdout
