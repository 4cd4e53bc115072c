import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient_s


# Scenarios are accepted and checked by tests/tuner/regress, too.
@pytest.mark.slow
def test_scenarios_of_training_and_serving_are_accepted_checked_and_pass() -> None:
    script = Path(__file__).with_name("check_speed.py")
    done = subprocess.run(
        [sys.executable, str(script), "--json", "--scenarios", "10"],
        capture_output=True,
        text=True,
        timeout=patient_s(280),
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["verdicts"] == {"pass": 10}
    assert report["cpu_s"] > 0.0
    assert report["not_planned"] == []
