import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("training_accuracy.py")
RUNS = SCRIPT.parents[1] / "tuner" / "backtest" / "runs.csv"


@pytest.mark.slow
def test_every_figure_is_printed_beside_its_aim() -> None:
    # The small table has none of the sources that have aims, so that nothing can be missed but
    # the bands' share, for which it has too few recipes.
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(RUNS)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert "generic constants, nothing fitted" in done.stdout
    assert "vtrain-multi mean: nothing to measure" in done.stdout
    assert "runs that ran and are said not to fit: 0, aim 0, reached" in done.stdout
    assert done.stdout.count("models with experts") == 2
