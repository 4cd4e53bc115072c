"""Estimates of small benchmarks beside published ones: requests a second, TTFT and TPOT.

    python tests/benchmarks/serving_bursts.py

Rows of `data/serving_bursts.csv`: benchmarks that send all their requests at once and divide by the
time to the last end, on GPUStack's performance lab (github.com/gpustack/gpustack,
docs/performance-lab; `page` names the file), the two engines' first and recommended commands at
prompts of 2,000 to 32,000 tokens, and at ShareGPT's, whose lengths are spread (`spread`: the
coefficient of variation that is assumed of them; the pages state means); and every launch of
sgl-cookbook (github.com/sgl-project/sgl-cookbook, docs/autoregressive, 7b5bd9c0) without drafts
whose model is in `examples/models`, at `concurrency` requests in flight, lengths even from 1 to
twice the mean. Kernels are the datasheets'. No constant was fitted to bursts; the cookbook's pauses
of running outputs gave the host's time for prompts without graphs.
"""

import csv
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.expect import present
from tuner.estimate.serving.estimate import pool_named, surroundings
from tuner.estimate.serving.instance import build_inputs, price_option, simulate_load
from tuner.estimate.serving.registry import read_serving_text
from tuner.goals.serve_plan import price_serving_pool
from tuner.goals.serve_spec import read_serve_spec

HERE = Path(__file__).parent
DATA = HERE / "data" / "serving_bursts.csv"
MODELS = HERE.parents[1] / "examples" / "models"
NAMES = ("requests_per_s", "ttft_s", "tpot_s", "ttft_median_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """One published benchmark, and predicted over measured figures in the order of `NAMES`."""

    row: Mapping[str, str]
    ratios: tuple[float, ...]
    priced_ratio: float
    """Requests a second as a plan prices them by whole steps, over those of the simulation, which
    adds up parts of steps."""


def read_rows() -> list[dict[str, str]]:
    """Return the published bursts."""
    with DATA.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def estimate_burst(row: Mapping[str, str], folder: Path) -> Burst:
    """Predict one burst."""
    path = folder / "spec.yaml"
    path.write_text(
        f"schema_version: 1\nmodel: {MODELS / row['model']}\ncluster:\n"
        f"  pools: [{{name: gpus, device: {row['device']}, nodes: 1,"
        f" devices_per_node: {row['devices']}}}]\n"
        f"goal:\n  kind: serve\n  engine: {{name: {row['engine']}}}\n"
        f"  traffic: {{concurrency: {row['concurrency'] or row['requests']},"
        f" requests: {row['requests']},"
        f" input_tokens: {_law(row, 'input_tokens', most=1024)},"
        f" output_tokens: {_law(row, 'output_tokens', most=1600)}}}\n"
        f"  quantization: {row['quantization']}\n",
        encoding="utf-8",
    )
    spec = read_serve_spec(path)
    pool = pool_named(spec, None)
    around = surroundings(spec, pool)
    launch = read_serving_text(row["command"], around, engine=row["engine"], source="command")
    inputs = build_inputs(
        launch, spec=spec, serving_pool=price_serving_pool(pool, ()), release=row["release"]
    )
    option = price_option(inputs, launch.setting)
    load = simulate_load(inputs, option)
    ttft, tpot = present(load.ttft_s), present(load.tpot_s)
    predicted = (load.requests_per_s, ttft.mean, tpot.mean, ttft.p50)
    measured = [float(row[name] or "nan") for name in NAMES]
    return Burst(
        row=row,
        ratios=tuple(np.divide(predicted, measured).tolist()),
        priced_ratio=option.rate_per_s / load.requests_per_s,
    )


def _law(row: Mapping[str, str], name: str, *, most: int) -> str:
    """Return the lengths of a row as a spec has them."""
    mean, cv = row[name], row["spread"]
    if cv == "uniform":
        return f"{{kind: uniform, low: 1, high: {2 * int(mean) - 1}}}"
    return mean if cv == "0" else f"{{kind: lognormal, mean: {mean}, cv: {cv}, most: {most}}}"


def kind_of(row: Mapping[str, str]) -> str:
    """Return the kind of benchmark that a row belongs to."""
    if row["concurrency"]:
        return "cookbook"
    return "burst" if row["spread"] == "0" else "ShareGPT"


def bursts() -> Iterator[Burst]:
    """Predict every benchmark."""
    with tempfile.TemporaryDirectory() as folder:
        for row in read_rows():
            yield estimate_burst(row, Path(folder))


def main() -> int:
    """Print predicted over measured figures by row, and their medians."""
    kinds: dict[str, list[tuple[float, ...]]] = defaultdict(list)
    sys.stdout.write(f"{'':45}" + "".join(f"{name:>16}" for name in NAMES) + "\n")
    for burst in bursts():
        row = burst.row
        name = f"{row['model']} {row['devices']} x {row['device']} {row['engine']}"
        kinds[kind_of(row)].append(burst.ratios)
        figures = "".join(f"{ratio:16.2f}" for ratio in burst.ratios)
        sys.stdout.write(f"{name:40}{row['input_tokens']:>5}{figures}\n")
    for kind, ratios in kinds.items():
        logs = np.log(np.array(ratios))
        for label, factor in (
            ("median", np.exp(np.median(logs, axis=0))),
            ("median factor either way", np.exp(np.median(np.abs(logs), axis=0))),
        ):
            named = f"{label}, {kind}"
            sys.stdout.write(f"{named:45}" + "".join(f"{one:16.2f}" for one in factor) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
