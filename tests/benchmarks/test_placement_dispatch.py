import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("placement_dispatch.py")


def test_a_small_case_is_judged_under_every_rule() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", "--small"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {line["placement"]: line for line in json.loads(done.stdout)}
    plans = ["eplb", "even plan", "static plan", "best plan"]
    assert list(found) == [*plans, "static oracle", "near oracle"]
    for line in found.values():
        loads = line["loads"]
        for rule in ("even", "near", "static", "lp", "near_lp", "dynamic 32", "near_dynamic 32"):
            assert loads[rule] >= line["bound"] - 0.01, (line["placement"], rule)
        # A linear program never splits worse than evenly, and lots only add to what is expected.
        assert loads["lp"] <= loads["even"] + 1e-6
        assert loads["static max"] >= loads["static mean"] >= loads["near"] - 1e-9
        assert loads["dynamic 32"] > loads["even"]
    assert found["even plan"]["loads"]["even"] < found["eplb"]["loads"]["even"]
    # Who sees the judged passes is not above who does not, but by what a search leaves.
    for name in plans:
        assert found["near oracle"]["loads"]["near"] <= found[name]["loads"]["near"] + 0.005, name
    assert found["static plan"]["solve_s"] > 0.0
    assert found["best plan"]["dispatch"] == "dynamic"
