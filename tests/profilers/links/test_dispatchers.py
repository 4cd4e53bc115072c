"""The reference step on emulated nodes: what de-duplication takes off the slow link."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from profilers.steps.config import StepConfig, StepReport
from tests.patience import patient_s
from tests.profilers.steps.crossing import inter_node_bytes

NODES, RANKS_PER_NODE = 2, 2
STEPS, WARMUP_STEPS = 3, 1
EVEN = (1 / 16,) * 16
SLOPE = tuple((16 - expert) ** 2 / 1496 for expert in range(16))
"""Only every second token needs the second node."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def _config(dispatcher: str, load_ratio: Sequence[float]) -> StepConfig:
    """Few weights and many tokens, so that dispatch is most of what crosses."""
    fields = {
        "model": {
            "hidden_size": 256,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "vocab_size": 256,
            "layers": ["moe"],
            "num_experts": 16,
            "top_k": 4,
            "moe_ffn_size": 64,
        },
        "parallelism": {"data": 4, "expert": 4, "dispatcher": dispatcher},
        "stages": [{"num_layers": 1}],
        "sequence_length": 512,
        "global_batch_size": 8,
        "micro_batch_size": 1,
        "precision": "fp32",
        "routing": {"mode": "forced", "load_ratio": [load_ratio]},
        "steps": STEPS,
        "warmup_steps": WARMUP_STEPS,
        "device": "cpu",
    }
    return StepConfig.model_validate(fields)


def _run(cluster: Any, config: StepConfig, folder: Path) -> tuple[StepReport, int]:
    """The report, and the bytes that left any node while the job ran."""
    folder.mkdir()
    (folder / "step.json").write_text(config.model_dump_json(), encoding="utf-8")
    starter = (
        f"exec {sys.executable} -m torch.distributed.run --nnodes {NODES}"
        f" --nproc-per-node {RANKS_PER_NODE} --node-rank $GROUP_RANK"
        ' --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"'
        ' --log-dir "$2" -m profilers.steps "$0" --report "$1"'
    )
    before = _sent_bytes(cluster)
    files = [str(folder / name) for name in ("step.json", "report.json", "logs")]
    command = ("sh", "-c", starter, *files)
    for ended in cluster.run(command):
        assert ended.returncode == 0, ended.stderr[-2000:]
    sent = _sent_bytes(cluster) - before
    text = (folder / "report.json").read_text(encoding="utf-8")
    return StepReport.model_validate_json(text), sent


def _sent_bytes(cluster: Any) -> int:
    """What the nodes' devices have sent so far, headers included."""
    total = 0
    for node, space in enumerate(cluster.namespaces):
        command = ("ip", "-n", space, "-s", "-j", "link", "show", f"n{node}")
        shown = subprocess.run(command, check=True, capture_output=True, timeout=patient_s(30.0))
        (link,) = json.loads(shown.stdout)
        total += int(link["stats64"]["tx"]["bytes"])
    return total


@pytest.mark.parametrize("load_ratio", [EVEN, SLOPE], ids=["even", "slope"])
def test_the_slow_link_carries_less_by_as_much_as_predicted(
    emulated_cluster: Callable[..., Any],
    tmp_path: Path,
    load_ratio: Sequence[float],
) -> None:
    cluster = emulated_cluster(nodes=NODES, rate="200mbit", delay_s=1e-3)
    predicted, counted, sent, step_s = {}, {}, {}, {}
    for dispatcher in ("flat", "hierarchical"):
        config = _config(dispatcher, load_ratio)
        report, sent[dispatcher] = _run(cluster, config, tmp_path / dispatcher)
        predicted[dispatcher] = inter_node_bytes(config, ranks_per_node=RANKS_PER_NODE)
        counted[dispatcher] = report.inter_node_bytes
        step_s[dispatcher] = report.step_s
    # Shown with -s: the gain in time is the machine's as much as the dispatcher's.
    sys.stdout.write(f"\nstep_s {step_s}\nsent bytes {sent}\npredicted a step {predicted}\n")
    for dispatcher, steps in counted.items():
        assert steps == pytest.approx([predicted[dispatcher]] * STEPS, rel=0.05)
    # Everything else that the nodes say to each other is the same in both runs; besides the timed
    # and the warm-up steps there is the metered one.
    falls = (predicted["flat"] - predicted["hierarchical"]) * (STEPS + WARMUP_STEPS + 1)
    assert sent["flat"] - sent["hierarchical"] == pytest.approx(falls, rel=0.05)
