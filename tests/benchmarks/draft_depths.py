"""Depths of drafting: measured time per token by depth and load, beside the predicted one.

    python tests/benchmarks/draft_depths.py

Rows of `data/draft_depths.csv`: vLLM with EAGLE drafters, by depth and requests in flight. The
32B's and the 70B's are logs of `vllm bench serve` (github.com/tomasruizt/vllm-scripts, January
2026; the 70B's devices are not named: 43 ms a step on two are those of A100 PCIe); Llama-3.1-8B is
a single stream (vllm-project/vllm#20780, whose author's other reports are of H100). Acceptance is
that of the deepest run by position, where all before were accepted; the 8B's follows from the means
by depth. One curve of acceptance predicts all depths, as a plan does. No constant was fitted to
these rows. Exit code 1: at a load the choice is off by more than a step, and its measured time per
token is more than 5 % above the best.
"""

import csv
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tests.benchmarks.bars import say
from tests.expect import present
from tuner.estimate.serving.estimate import pool_named, surroundings
from tuner.estimate.serving.instance import build_inputs, price_option, simulate_load
from tuner.estimate.serving.registry import read_serving_text
from tuner.goals.serve_plan import price_serving_pool
from tuner.goals.serve_spec import read_serve_spec

HERE = Path(__file__).parent
DATA = HERE / "data" / "draft_depths.csv"
MODELS = HERE.parents[1] / "examples" / "models"
NOISE = 0.02
"""Share by which two depths of one load differ that no one can tell apart."""
MOST_COST = 1.05
REQUESTS = 96

Curves = Mapping[tuple[str, int], Mapping[int, tuple[float, float]]]


def predicted_tpot_s(row: Mapping[str, str], folder: Path) -> float:
    """Predict the mean time per token of one row."""
    depth, count = int(row["depth"]), int(row["concurrency"])
    path = folder / "spec.yaml"
    path.write_text(
        f"schema_version: 1\nmodel: {MODELS / row['model']}\ncluster:\n"
        f"  pools: [{{name: gpus, device: {row['device']}, nodes: 1,"
        f" devices_per_node: {row['devices']}}}]\n"
        f"goal:\n  kind: serve\n  engine: {{name: vllm}}\n"
        f"  traffic: {{concurrency: {count}, requests: {max(REQUESTS, 3 * count)},"
        f" input_tokens: {row['input_tokens']}, output_tokens: {row['output_tokens']}}}\n"
        f"  speculative: {{method: eagle, draft_tokens: 8,"
        f" acceptance: [{', '.join(row['acceptance'].split())}]}}\n",
        encoding="utf-8",
    )
    drafts = f'{{"method": "eagle3", "model": "drafter", "num_speculative_tokens": {depth}}}'
    command = (
        f"vllm serve {row['model']} --tensor-parallel-size {row['devices']} --max-model-len 5000"
        f" --no-enable-prefix-caching --max-num-seqs {row['max_num_seqs']}"
        + (f" --speculative-config '{drafts}'" if depth else "")
    )
    spec = read_serve_spec(path)
    pool = pool_named(spec, None)
    launch = read_serving_text(command, surroundings(spec, pool), engine="vllm", source="command")
    inputs = build_inputs(
        launch, spec=spec, serving_pool=price_serving_pool(pool, ()), release=row["release"]
    )
    load = simulate_load(inputs, price_option(inputs, launch.setting))
    return present(load.tpot_s).mean


def curves(wanted: str = "") -> Curves:
    """Return measured and predicted seconds by depth, of every curve whose name holds a word."""
    found = defaultdict[tuple[str, int], dict[int, tuple[float, float]]](dict)
    with DATA.open(encoding="utf-8", newline="") as file, tempfile.TemporaryDirectory() as scratch:
        for row in csv.DictReader(file):
            if wanted in row["curve"]:
                seconds = float(row["tpot_ms"]) * 1e-3, predicted_tpot_s(row, Path(scratch))
                found[row["curve"], int(row["concurrency"])][int(row["depth"])] = seconds
    return found


def judged(by_depth: Mapping[int, tuple[float, float]]) -> tuple[int, float]:
    """Return how many depths the predicted best is from the measured best, and what that costs.

    Depths that took as long as the best within `NOISE` are best, too. The cost is the measured time
    per token at the chosen depth over the least.
    """
    depths = sorted(by_depth)
    least_s = min(measured_s for measured_s, _ in by_depth.values())
    best = [depth for depth in depths if by_depth[depth][0] <= (1.0 + NOISE) * least_s]
    chosen = min(depths, key=lambda depth: by_depth[depth][1])
    steps = min(abs(depths.index(chosen) - depths.index(depth)) for depth in best)
    return steps, by_depth[chosen][0] / least_s


def main() -> int:
    """Print every curve and return 1 if a choice is off by more than a step and costs 5 %."""
    found = curves()
    ratios = []
    for (curve, count), by_depth in found.items():
        steps, cost = judged(by_depth)
        say(f"{curve}, {count} in flight: {steps} steps off, {cost - 1.0:.1%} slower than the best")
        for depth, (measured_s, predicted_s) in sorted(by_depth.items()):
            ratios.append(predicted_s / measured_s)
            times = f"{1e3 * measured_s:6.2f} ms, predicted {1e3 * predicted_s:6.2f}"
            say(f"  {depth} drafts  {times}, ratio {ratios[-1]:.2f}")
    results = [judged(by_depth) for by_depth in found.values()]
    exact, near = (sum(steps <= limit for steps, _ in results) for limit in (0, 1))
    worst = max(cost for _, cost in results) - 1.0
    say(f"predicted over measured time per token, median {np.median(ratios):.2f}")
    say(f"{len(results)} loads: {exact} best depths, {near} within a step, worst cost {worst:.1%}")
    return int(any(steps > 1 and cost > MOST_COST for steps, cost in results))


if __name__ == "__main__":
    sys.exit(main())
