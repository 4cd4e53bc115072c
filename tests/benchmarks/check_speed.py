"""Duration of `moetune check` over many scenarios: `python tests/benchmarks/check_speed.py`.

The scenarios are those of a team with a few models on its cluster: five models with their usual
degrees, over batch sizes, and every tenth a deployment; about a second of planning each. A search
without limits takes longer: `cpu_s` in examples/checks/*/baseline.json. The scenarios are planned
and accepted first, then checked; the check is timed, in wall time and in processor time with all
child processes. All of them must pass. Load on the machine increases the wall time.
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
    """Write `count` scenarios, every tenth a deployment."""
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
    """Accept, check, and print the time of the check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    manner = Manner(workers=arguments.jobs)
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        folder = Path(scratch)
        write_scenarios(folder, arguments.scenarios)
        accepted = check(folder, update=True, manner=manner)
        before_s, started_s = _processor_s(), time.perf_counter()
        result = check(folder, manner=manner)
        wall_s, cpu_s = time.perf_counter() - started_s, _processor_s() - before_s
    report = {
        "scenarios": arguments.scenarios,
        "jobs": arguments.jobs,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "verdicts": result.counts(),
        "not_planned": sorted({one.reason for one in accepted.scenarios if one.verdict == "error"}),
    }
    if arguments.json:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        sys.stdout.write(
            f"{arguments.scenarios} scenarios, {arguments.jobs} at a time: {wall_s:.1f} s,"
            f" {cpu_s:.1f} s of the processor; verdicts {result.counts()}\n"
        )
    return int(result.counts() != {"pass": arguments.scenarios})


def _processor_s() -> float:
    """Processor seconds of this process and its ended children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(
        used.ru_utime + used.ru_stime for used in (resource.getrusage(kind) for kind in kinds)
    )


if __name__ == "__main__":
    sys.exit(main())
