"""How long `moetune check` takes over many scenarios: `python tests/benchmarks/check_speed.py`.

The scenarios are what a team keeps that runs a few models on its cluster: five models with the
degrees that are run, over batch sizes, and every tenth a deployment; about a second of planning
each. A search without limits takes longer: `cpu_s` in examples/checks/*/baseline.json. They are
planned and accepted first, then checked; the second is timed, on the clock and in processor time
with all that it started. All of them must pass. A machine that is busy takes longer on the clock.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tuner.regress.check import check
from tuner.regress.checks import Manner

EXAMPLES = Path(__file__).parents[2] / "examples"
TRAIN = """\
schema_version: 1
model: {examples}/models/{model}/config.json
cluster:
  pools: [{{name: h100, device: h100-sxm, nodes: {nodes}, devices_per_node: 8, nic: 400Gbit/s}}]
goal: {{kind: train, sequence_length: 4096, global_batch_size: {batch}, precision: bf16}}
search:
  tensor_model_parallel_size: [1, 2]
  pipeline_model_parallel_size: [2, 4]
  context_parallel_size: 1
  micro_batch_size: 1
  zero_stage: 1
  dispatcher: alltoall
  expert_tensor_parallel_size: 1
emit: [megatron-lm, slurm]
"""
SERVE = """\
schema_version: 1
model: {examples}/models/qwen3-30b-a3b
cluster:
  pools: [{{name: h100, device: h100-sxm, nodes: 1, devices_per_node: 8}}]
goal:
  kind: serve
  engine: {{name: vllm}}
  traffic: {{concurrency: {concurrency}, input_tokens: 2000, output_tokens: 500}}
  slo: {{ttft: {{p90: 2s}}, tpot: {{p90: 50ms}}}}
  objective: goodput
emit: [vllm]
"""
MODELS = {
    "mixtral-8x7b": 8,
    "qwen3-30b-a3b": 4,
    "gpt-oss-20b": 2,
    "llama-3.1-8b": 2,
    "deepseek-v2-lite": 2,
}
"""Nodes by model."""


def write_scenarios(folder: Path, count: int) -> None:
    """Write so many scenarios, every tenth a deployment."""
    names = list(MODELS)
    for number in range(count):
        model = names[number % len(names)]
        batch = 128 * (1 + number // len(names))
        text = TRAIN.format(examples=EXAMPLES, model=model, nodes=MODELS[model], batch=batch)
        if number % 10 == 9:
            text = SERVE.format(examples=EXAMPLES, concurrency=16 * (1 + number // 10))
        scenario = folder / f"scenario-{number:03d}"
        scenario.mkdir(parents=True)
        (scenario / "spec.yaml").write_text(text, encoding="utf-8")


def main() -> int:
    """Accept, check, and print what the check took."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    manner = Manner(workers=asked.jobs)
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        folder = Path(scratch)
        write_scenarios(folder, asked.scenarios)
        accepted = check(folder, update=True, manner=manner)
        before_s, started_s = _processor_s(), time.perf_counter()
        found = check(folder, manner=manner)
        wall_s, cpu_s = time.perf_counter() - started_s, _processor_s() - before_s
    report = {
        "scenarios": asked.scenarios,
        "jobs": asked.jobs,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "verdicts": found.counts(),
        "not_planned": sorted({one.reason for one in accepted.scenarios if one.verdict == "error"}),
    }
    if asked.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write(
            f"{asked.scenarios} scenarios, {asked.jobs} at a time: {wall_s:.1f} s,"
            f" {cpu_s:.1f} s of the processor; verdicts {found.counts()}\n"
        )
    return int(found.counts() != {"pass": asked.scenarios})


def _processor_s() -> float:
    """Seconds of this process and of all that it started and that ended."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(
        used.ru_utime + used.ru_stime for used in (resource.getrusage(kind) for kind in kinds)
    )


if __name__ == "__main__":
    sys.exit(main())
