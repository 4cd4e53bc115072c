"""`solve_s` is the time that the whole plan took, not that of its first search."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rows import each_row
from tuner import api

EXAMPLES = Path(__file__).parents[3] / "examples"
SPECS = {
    # No layout fits, so that what would help is searched for as well.
    "train": f"""\
schema_version: 1
model: {EXAMPLES}/models/tiny-moe
cluster: {{pools: [{{name: a, device: h100-sxm, devices_per_node: 2, memory_per_device: 1MiB}}]}}
goal: {{kind: train, sequence_length: 256, global_batch_size: 32}}
search: {{context_parallel_size: 1, tensor_model_parallel_size: 1, micro_batch_size: 1,
  zero_stage: 1, recompute: none}}
emit: [megatron-lm]
""",
    "serve": f"""\
schema_version: 1
model: {EXAMPLES}/models/kimi-k2
cluster: {{pools: [{{name: a, device: a100-80gb, devices_per_node: 8}}]}}
goal:
  kind: serve
  engine: {{name: sglang}}
  traffic: {{rate: 1/s, input_tokens: 1000, output_tokens: 200}}
  objective: devices
""",
    "place": """\
schema_version: 1
goal:
  {kind: place, objective: balance, ranks: 2, ranks_per_node: 1, slots_per_rank: 3, robust: mean,
  workloads: [{name: chat, path: chat.json}, {name: code, path: code.json}]}
""",
}


LOADS = {
    "num_logical_experts": 4,
    "top_k": 2,
    "layer_ids": [0, 1],
    "logical_count": [[40, 30, 20, 10], [1, 2, 3, 4]],
}


@each_row("kind", SPECS)
def test_the_stated_time_is_from_the_call_to_the_plan(tmp_path: Path, kind: str) -> None:
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPECS[kind], encoding="utf-8")
    for name in ("chat", "code"):
        (tmp_path / f"{name}.json").write_text(json.dumps(LOADS), encoding="utf-8")
    ticks = itertools.count()
    arguments: list[float] = []

    def clock() -> float:
        # A clock that moves only when it is asked, by a millisecond.
        arguments.append(next(ticks) / 1000.0)
        return arguments[-1]

    plan_of: dict[str, Callable[..., object]] = {
        "train": api.plan,
        "serve": api.deploy,
        "place": api.place,
    }
    made = plan_of[kind](spec, clock=clock)
    certificate = made.plan.certificate  # type: ignore[attr-defined] # of any kind
    assert len(arguments) > 2
    assert certificate.solve_s == pytest.approx(arguments[-1] - arguments[0])
