"""A recorded load of any length is planned for in the memory of a short one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
SPEC = """\
schema_version: 1
model: {models}/mixtral-8x7b
cluster: {{pools: [{{name: h100, device: h100-sxm, nodes: 2, devices_per_node: 8}}]}}
goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{trace: trace.csv}}
  slo: {{ttft: {{p90: 2s}}, tpot: {{p90: 50ms}}}}
  modes: [aggregated]
"""
MOST_BYTES = 300e6
PER_S = 5.0
CHUNK_ROWS = 100_000
RUN = """
import sys
from tuner.__main__ import main
code = main()
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""
"""The command, and the most memory that it had as its last words."""


def recorded(path: Path, rows: int) -> None:
    """Write a trace in BurstGPT's columns, Poisson at 5 requests a second."""
    rng = np.random.default_rng(0)
    last_s = 0.0
    with path.open("w") as file:
        file.write("Timestamp,Request tokens,Response tokens\n")
        for _ in range(rows // CHUNK_ROWS):
            at_s = last_s + np.cumsum(rng.exponential(1.0 / PER_S, CHUNK_ROWS))
            last_s = float(at_s[-1])
            tokens = rng.integers(10, 2000, CHUNK_ROWS).tolist()
            lines = (f"{at:.1f},{num},40\n" for at, num in zip(at_s.tolist(), tokens, strict=True))
            file.write("".join(lines))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account")
@pytest.mark.parametrize(
    "rows", [200_000, pytest.param(10_000_000, marks=pytest.mark.slow)], ids=str
)
def test_a_long_trace_takes_no_more_memory_than_a_short_one(rows: int, tmp_path: Path) -> None:
    recorded(tmp_path / "trace.csv", rows)
    spec, out = tmp_path / "spec.yaml", tmp_path / "out"
    spec.write_text(SPEC.format(models=ROOT / "examples" / "models"))
    done = subprocess.run(
        [sys.executable, "-c", RUN, "plan", str(spec), "-o", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )
    (tmp_path / "trace.csv").unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    assert 1024 * int(done.stdout.split()[-2]) <= MOST_BYTES
    predicted = json.loads((out / "plan.json").read_text())["predicted"]
    assert predicted["requests_per_s"] == pytest.approx(PER_S, rel=0.05)
