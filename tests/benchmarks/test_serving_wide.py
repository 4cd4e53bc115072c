import subprocess
import sys
from pathlib import Path

from tests.patience import patient_s

SCRIPT = Path(__file__).with_name("serving_wide.py")


def test_published_throughput_of_many_devices_is_met_within_a_factor() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=patient_s(120),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "prompts, even loads, halves" in done.stdout
    assert "published 22,300" in done.stdout
