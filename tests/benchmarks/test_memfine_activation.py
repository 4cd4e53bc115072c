import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


# tests/profilers/steps/test_memory.py counts the bytes of every chunk.
@pytest.mark.slow
def test_measured_activations_fall_as_a_constant_plus_a_share() -> None:
    script = Path(__file__).with_name("memfine_activation.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert len(re.findall(r"^ +[1248] +[\d.]+ +[\d.]+ +[+-][\d.]+%$", done.stdout, re.M)) == 8
    assert "11.93" in done.stdout
