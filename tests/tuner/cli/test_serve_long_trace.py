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
  traffic: {{trace: trace.txt}}
  slo: {{ttft: {{p90: 2s}}, tpot: {{p90: 50ms}}}}
  modes: [aggregated]
"""
MOST_BYTES = 300e6
CACHED_BYTES = 500e6
"""With blocks of prompts, of which caches are kept track of."""
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


def recorded(path: Path, rows: int, *, has_blocks: bool) -> None:
    """Write a trace in BurstGPT's columns, or in Mooncake's, Poisson at 5 requests a second.

    Of every prompt with blocks the first 512 tokens are common to all, the rest its own.
    """
    rng = np.random.default_rng(0)
    last_s = 0.0
    with path.open("w") as file:
        if not has_blocks:
            file.write("Timestamp,Request tokens,Response tokens\n")
        for chunk in range(rows // CHUNK_ROWS):
            at_s = last_s + np.cumsum(rng.exponential(1.0 / PER_S, CHUNK_ROWS))
            last_s = float(at_s[-1])
            tokens = rng.integers(10, 2000, CHUNK_ROWS).tolist()
            rows_of = enumerate(zip(at_s.tolist(), tokens, strict=True), start=chunk * CHUNK_ROWS)
            line = _mooncake if has_blocks else _burst_gpt
            file.write("".join(line(number, at, num) for number, (at, num) in rows_of))


def _burst_gpt(_number: int, at_s: float, tokens: int) -> str:
    return f"{at_s:.1f},{tokens},40\n"


def _mooncake(number: int, at_s: float, tokens: int) -> str:
    blocks = [0, *range(4 * number + 1, 4 * number + -(-tokens // 512))]
    return (
        f'{{"timestamp": {round(1e3 * at_s)}, "input_length": {tokens}, "output_length": 40,'
        f' "hash_ids": {blocks}}}\n'
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account")
@pytest.mark.parametrize(
    "rows", [100_000, pytest.param(10_000_000, marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize(
    "has_blocks",
    # Seconds: a shorter trace is no burden to anyone, and of the two this one holds more.
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["blocks", "lengths"],
)
def test_a_long_trace_takes_no_more_memory_than_a_short_one(
    rows: int, has_blocks: bool, tmp_path: Path
) -> None:
    recorded(tmp_path / "trace.txt", rows, has_blocks=has_blocks)
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
    (tmp_path / "trace.txt").unlink()
    assert done.returncode == 0, done.stderr[-2000:]
    assert 1024 * int(done.stdout.split()[-2]) <= (CACHED_BYTES if has_blocks else MOST_BYTES)
    plan = json.loads((out / "plan.json").read_text())
    assert plan["predicted"]["requests_per_s"] == pytest.approx(PER_S, rel=0.05)
    assert (plan["prefix_reuse"] is not None) == has_blocks
    if has_blocks:
        # A common block of 512 tokens in prompts of 10 to 2000: 0.44 of 1005 tokens on average.
        assert plan["prefix_reuse"]["hit_ratio"] == pytest.approx(0.44, abs=0.01)
