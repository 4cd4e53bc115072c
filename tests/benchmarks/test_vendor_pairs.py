import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patient_s


@pytest.mark.slow
def test_the_joint_choice_is_never_beaten_by_one_role_first() -> None:
    script = Path(__file__).with_name("vendor_pairs.py")
    done = subprocess.run(
        [sys.executable, str(script), "--json"],
        capture_output=True,
        text=True,
        timeout=patient_s(280),
        check=False,
        env=os.environ
        | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PYTHONWARNINGS": "default",
        },
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads(done.stdout)
    assert len({row["spec"] for row in rows}) == 2
    unlike = 0
    for row in rows:
        cost = {name: float("inf") if value is None else value for name, value in row.items()}
        for joint, others in (
            ("joint", ("one_router", "prefill_first", "decode_first", "h100 alone")),
            ("no_rules", ("joint", "no_rules_prefill_first", "no_rules_decode_first")),
        ):
            for other in others:
                assert cost[joint] <= cost[other] * (1.0 + 1e-6), (row, other)
                unlike += cost[joint] < cost[other] * (1.0 - 1e-6)
    assert unlike > 5
