"""Gain of redundant experts in a deployment, and the cost of searching for them.

    python tests/benchmarks/serving_copies.py

DeepSeek-V3 with SGLang from datasheets, 2,000 input and 1,000 output tokens, 5 s TTFT and 60 ms
TPOT (P90): planned once as released and once as if no model had redundant experts, without a
recording and with one (58 layers of log-normal loads, sigma 0.6, seed 1, made here). The objective
is the fewest devices for a rate, or the most requests a second of all devices. Printed are devices
or rates, the instances, and seconds of this process. Exit code 1: redundant experts make a plan
worse.
"""

import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final
from unittest.mock import patch

from tuner.config.serve_words import group_degrees
from tuner.devices.datasheet import Vendor
from tuner.engines import serve_capabilities as registry
from tuner.goals.serve_plan import deploy
from tuner.plans.serve import ServePlan

MODEL: Final = Path(__file__).parents[2] / "examples" / "models" / "deepseek-v3"
CASES: Final = (
    ("h100-sxm", 9, 20.0),
    ("h100-sxm", 9, 30.0),
    ("h100-sxm", 9, None),
    ("h200-sxm", 4, 20.0),
    ("h200-sxm", 4, None),
    ("h100-sxm", 3, None),
)
"""Device, machines of eight, and requests a second; None: the most."""
LAYERS: Final = range(3, 61)
SIGMA: Final = 0.6
SPEC: Final = """\
schema_version: 1
model: {model}
cluster: {{pools: [{{name: pool, device: {device}, nodes: {nodes}, devices_per_node: 8}}]}}
goal:
  kind: serve
  engine: {{name: sglang}}
  traffic: {{{rate}input_tokens: 2000, output_tokens: 1000}}
  slo: {{ttft: {{p90: 5s}}, tpot: {{p90: 60ms}}}}
  quantization: fp8_block
  objective: {objective}
  modes: [aggregated, disaggregated]
{routing}emit: [sglang]
"""


def main() -> int:
    """Print every case with and without copies."""
    worse = False
    for is_recorded in (False, True):
        for device, nodes, rate in CASES:
            result = []
            for has_copies in (False, True):
                started_s = time.process_time()
                plan = planned(device, nodes, rate, is_recorded=is_recorded, has_copies=has_copies)
                result.append(worth(plan))
                taken_s = time.process_time() - started_s
                sys.stdout.write(
                    f"{8 * nodes} {device}, {'recorded' if is_recorded else 'no recording'},"
                    f" {'the most' if rate is None else f'{rate:g}/s'},"
                    f" {'with' if has_copies else 'without'} copies: {described(plan)};"
                    f" {taken_s:.1f} CPU-s\n"
                )
            # Bisection leaves a rate 1 % open.
            worse |= result[1] < result[0] * 0.99
    return int(worse)


def planned(
    device: str, nodes: int, rate: float | None, *, is_recorded: bool, has_copies: bool
) -> ServePlan:
    """Plan a case."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if is_recorded:
            (folder / "routing.json").write_text(json.dumps(recording()))
        spec = folder / "spec.yaml"
        spec.write_text(
            SPEC.format(
                model=MODEL,
                device=device,
                nodes=nodes,
                rate="" if rate is None else f"rate: {rate}/s, ",
                objective="rate" if rate is None else "devices",
                routing="  routing: {path: routing.json}\n" if is_recorded else "",
            )
        )
        with released(has_copies=has_copies):
            return deploy(spec, time_limit_s=60.0).plan


@contextmanager
def released(*, has_copies: bool) -> Iterator[None]:
    """Enable or disable redundant experts of the release."""
    own = registry.ENGINES["sglang"]
    other = tuple(replace(one, redundant_architectures=frozenset()) for one in own)
    changed = {**registry.ENGINES, "sglang": own if has_copies else other}
    with patch.object(registry, "RELEASES", {**registry.RELEASES, Vendor.NVIDIA: changed}):
        yield


def recording() -> dict[str, object]:
    """Return loads of every layer with experts."""
    rng = random.Random(1)
    counts = [
        [max(1, int(1e4 * math.exp(rng.gauss(0.0, SIGMA)))) for _ in range(256)] for _ in LAYERS
    ]
    return {
        "num_logical_experts": 256,
        "top_k": 8,
        "layer_ids": list(LAYERS),
        "logical_count": counts,
    }


def worth(plan: ServePlan) -> float:
    """Return the objective as a value to maximise; 0 where nothing fits."""
    if plan.decision is None or plan.predicted is None:
        return 0.0
    if plan.goal.objective == "rate":
        return plan.predicted.requests_per_s
    return 1.0 / plan.decision.num_devices


def described(plan: ServePlan) -> str:
    """Describe the devices or rate of a plan, and its instances."""
    if plan.decision is None or plan.predicted is None:
        return "nothing fits"
    groups = " + ".join(
        f"{one.count} x {one.devices} {one.role.value} ({group_degrees(one)}"
        f"{f', {one.redundant_experts} copies' if one.redundant_experts else ''})"
        for one in plan.decision.instances
    )
    served = f"{plan.predicted.requests_per_s:.1f}/s on " if plan.goal.objective == "rate" else ""
    return f"{served}{plan.decision.num_devices} devices: {groups}"


if __name__ == "__main__":
    sys.exit(main())
