import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient_s

ROOT = Path(__file__).parents[2]
SPEC = ROOT / "examples" / "worked" / "mixtral-8x7b-64-a100" / "spec.yaml"


# Hidden machines answer in tests/tuner/verify/budget, too.
@pytest.mark.slow
def test_each_budget_has_its_line() -> None:
    script = ROOT / "tests" / "benchmarks" / "trial_budgets.py"
    done = subprocess.run(
        [sys.executable, str(script), str(SPEC), "1", "32", "0.25", "1"],
        capture_output=True,
        text=True,
        timeout=patient_s(280),
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert [line.split(",")[0] for line in lines] == ["15.0 min", "1.00 h"]
    for line in lines:
        assert re.search(r"32 devices: \d\.\d trials; ", line)
        assert "; choice " in line
    assert "whole jobs within the stated error" in lines[0]
