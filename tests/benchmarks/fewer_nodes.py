"""Throughput after one of four emulated nodes is lost and the others go on as the plan says.

    python tests/benchmarks/fewer_nodes.py [--profile FOLDER]

The model of tests/benchmarks/checkpoint_faults.py is planned for four nodes of one rank, on a
profile of this machine that is measured first unless it is given. The plan's layout for one node
less has 11 + 11 + 10 micro-batches and experts in three parts instead of four. The reference step
trains in the plan's layout, then from its shared checkpoint in the other, then in the first again.
The bound of the three nodes is three quarters of what the four reached, before and after; beside it
stands the ratio that the plan predicts. Needs root (control groups) and two idle cores for five
minutes. Exit code 1: less than `LEAST` of the bound, or another step than the next one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import yaml

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.benchmarks.checkpoint_faults import CONFIG, NODES, SCENARIO, node_groups
from tuner import api
from tuner.engines.reference.step_config import step_config
from tuner.plans.train import Plan
from tuner.verify.faults.measured import Step, steps_of
from tuner.verify.faults.nodes import emulated_nodes
from tuner.verify.faults.scenario import StatedPolicy
from tuner.verify.faults.supervisor import checkpointed, run_through_faults

STEPS: Final = 16
"""On four nodes, then on three, then on four."""
WARM_UP: Final = 2
MICROBATCHES: Final = {4: (8, 8, 8, 8), 3: (11, 11, 10)}
"""Of the plan's layouts."""
LEAST: Final = 0.95
DEADLINE_S: Final = 900.0
MOETUNE: Final = (sys.executable, "-P", "-m", "tuner")


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, run both layouts and compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--profile", type=Path, help="of four ranks of this machine")
    profile = parser.parse_args(arguments).profile
    with (
        tempfile.TemporaryDirectory(prefix="moetune-nodes-") as scratch,
        node_groups(cores=0.45) as groups,
    ):
        plans = _plans(Path(scratch), profile)
        whole, rest, again = (
            _steps(plans[nodes], nodes, steps, scratch=Path(scratch), groups=groups)
            for nodes, steps in ((NODES, STEPS), (NODES - 1, 2 * STEPS), (NODES, 3 * STEPS))
        )
    before_s, after_s = statistics.fmean(map(_median_s, (whole, again))), _median_s(rest)
    bound_s = before_s * NODES / (NODES - 1)
    reached = bound_s / after_s
    planned = _predicted_s(plans[NODES]) / _predicted_s(plans[NODES - 1])
    is_next = (rest[0].number, again[0].number) == (STEPS + 1, 2 * STEPS + 1)
    sys.stdout.write(
        f"{NODES} nodes {before_s:.3f} s a step, {NODES - 1} nodes {after_s:.3f} s, bound"
        f" {bound_s:.3f} s: {reached:.1%} of it (at least {LEAST:.0%})\n"
        f"throughput of {NODES - 1} nodes over that of {NODES}: {before_s / after_s:.1%}, planned"
        f" {planned:.1%}\n"
        f"{NODES} nodes before {_median_s(whole):.3f} s, after {_median_s(again):.3f} s\n"
        f"losses at the switches: {_losses(whole, rest)}; {_losses(rest, again)}\n"
    )
    return int(reached < LEAST or not is_next)


def _losses(before: Sequence[Step], after: Sequence[Step]) -> str:
    last, first = before[-1], after[0]
    return f"{last.loss:.6f} of step {last.number}, {first.loss:.6f} of step {first.number}"


def _plans(folder: Path, profile: Path | None) -> dict[int, Plan]:
    """Plan for all nodes, and take the plan's own layout for one node less."""
    model, pool = CONFIG.model, {"name": "here", "nodes": NODES, "devices_per_node": 1}
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                "hidden_act": "silu",
                "hidden_size": model.hidden_size,
                "head_dim": model.head_dim,
                "intermediate_size": model.moe_ffn_size,
                "num_attention_heads": model.num_heads,
                "num_key_value_heads": model.num_kv_heads,
                "num_hidden_layers": len(model.layers),
                "num_local_experts": model.num_experts,
                "num_experts_per_tok": model.top_k,
                "vocab_size": model.vocab_size,
                "max_position_embeddings": CONFIG.sequence_length,
                "rms_norm_eps": model.norm_epsilon,
                "rope_theta": model.rope_theta,
                "tie_word_embeddings": model.tie_embeddings,
            }
        ),
        encoding="utf-8",
    )
    spec: dict[str, Any] = {
        "schema_version": 1,
        "model": "config.json",
        "cluster": {"pools": [pool | {"profile": str(profile or "profile")}]},
        "goal": {
            "kind": "train",
            "sequence_length": CONFIG.sequence_length,
            "global_batch_size": sum(MICROBATCHES[NODES]),
            "precision": CONFIG.precision,
            "tokens": 1e9,
            "reliability": {
                "nodes_lost": "40% per week",
                "restart": "1min",
                "repair": "24h",
                "without_spare": "continue",
            },
        },
        # The two layouts are to differ in their replicas alone.
        "search": {
            "micro_batch_size": [CONFIG.micro_batch_size],
            "pipeline_model_parallel_size": [1],
            "tensor_model_parallel_size": [1],
            "recompute": ["none"],
        },
        "emit": ["reference"],
    }
    path = folder / "spec.yaml"
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    if profile is None:
        measure = ("profile", "-o", str(folder / "profile"), f"--ranks={NODES}", f"--for={path}")
        subprocess.run((*MOETUNE, *measure, "--suite=kernels,links"), check=True)
    made = api.plan_training(path)
    assert made.fewer is not None
    plans = {NODES: made.plan, NODES - 1: made.fewer.plan}
    for nodes, plan in plans.items():
        assert plan.decision is not None
        counts = plan.decision.microbatches_by_replica(plan.goal.global_batch_size)
        assert counts == MICROBATCHES[nodes]
    return plans


def _predicted_s(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_time_s


def _steps(
    plan: Plan, nodes: int, steps: int, *, scratch: Path, groups: Sequence[Path]
) -> list[Step]:
    assert plan.decision is not None
    config = step_config(plan, plan.decision, steps=1, warmup_steps=0)
    with emulated_nodes(nodes, ranks=nodes, groups=groups) as emulated:
        (launch,) = run_through_faults(
            checkpointed(
                config, StatedPolicy(shared=STEPS), steps=steps, nodes=emulated, folder=scratch
            ),
            (),
            folder=scratch / f"{steps}-steps",
            nodes=emulated,
            scenario=SCENARIO.model_copy(update={"hang": 60.0, "start_limit": 180.0}),
            deadline_s=DEADLINE_S,
        )
    return list(steps_of(launch))


def _median_s(steps: Sequence[Step]) -> float:
    return statistics.median(step.seconds for step in steps[WARM_UP:])


if __name__ == "__main__":
    sys.exit(main())
