"""Layouts of a step configuration with a node less."""

from typing import Any

import pytest

from profilers.steps.config import StepConfig
from tests.rows import Failures
from tuner.errors import SpecError
from tuner.verify.faults.fewer_nodes import fewer_nodes_policy, with_fewer_nodes
from tuner.verify.faults.scenario import StatedPolicy


def config(
    degrees: dict[str, int], *, sequences: int, experts: int = 12, **more: Any
) -> StepConfig:
    stages = degrees.get("pipeline", 1) * degrees.get("virtual_pipeline", 1)
    return StepConfig.model_validate(
        {
            "model": {
                "hidden_size": 32,
                "num_heads": 4,
                "num_kv_heads": 4,
                "head_dim": 8,
                "vocab_size": 64,
                "layers": ["moe"] * 4,
                "num_experts": experts,
                "top_k": 2,
                "moe_ffn_size": 32,
            },
            "parallelism": degrees,
            "stages": [{"num_layers": 4 // stages}] * stages,
            "sequence_length": 16,
            "global_batch_size": sequences,
            "micro_batch_size": 2,
            **more,
        }
    )


def test_replicas_are_left_out_and_their_micro_batches_spread() -> None:
    # Degrees, ranks of a node, data and expert degree, micro-batches of the layout.
    cases = {
        "experts divide": ({"data": 4, "expert": 4}, 1, 12, 16, (3, 3, (3, 3, 2))),
        "even": ({"data": 4, "expert": 4}, 1, 12, 24, (3, 3, (4, 4, 4))),
        "experts do not divide": ({"data": 4, "expert": 4}, 1, 8, 16, (3, 1, (3, 3, 2))),
        "two ranks a node": ({"data": 4, "tensor": 2, "expert": 4}, 2, 12, 16, (3, 3, (3, 3, 2))),
        "a node of two replicas": ({"data": 4, "expert": 2}, 2, 12, 16, (2, 2, (4, 4))),
        "a replica across nodes": ({"data": 2, "tensor": 2}, 1, 12, 16, (1, 1, (8,))),
        "pipelines across nodes": ({"data": 4, "pipeline": 2}, 2, 12, 24, (3, 1, (4, 4, 4))),
        # Of a pipeline, ranks of an expert group need as many micro-batches each.
        "pipelines and experts": (
            {"data": 4, "pipeline": 2, "expert": 4},
            2,
            12,
            16,
            (3, 1, (3, 3, 2)),
        ),
        # Interleaved pipelines need as many for all, a multiple of the stages: a node is idle.
        "interleaved": (
            {"data": 4, "pipeline": 2, "virtual_pipeline": 2},
            2,
            12,
            16,
            (2, 1, (4, 4)),
        ),
    }
    failures = Failures()
    for name, (degrees, ranks_per_node, experts, sequences, expected) in cases.items():
        whole = config(degrees, sequences=sequences, experts=experts)
        fewer = with_fewer_nodes(whole, ranks_per_node=ranks_per_node)
        made = fewer.parallelism
        with failures.of(name):
            assert (made.data, made.expert, fewer.microbatches_by_rank) == expected
            assert fewer.global_batch_size == whole.global_batch_size
            assert made.world % ranks_per_node == 0
            assert made.world <= whole.parallelism.world - ranks_per_node
    failures.check()


def test_what_spans_all_nodes_cannot_go_on() -> None:
    for degrees in ({"tensor": 4}, {"pipeline": 4}, {"tensor": 2, "pipeline": 2}):
        with pytest.raises(SpecError, match="without_spare: wait") as error:
            with_fewer_nodes(config(degrees, sequences=16), ranks_per_node=1)
        assert "\n" not in str(error.value)


def test_a_policy_has_no_more_replicas_than_other_nodes() -> None:
    policy = StatedPolicy(shared=8, host=4, replicas=2)
    assert [fewer_nodes_policy(policy, nodes=nodes).replicas for nodes in (4, 3, 2, 1)] == [
        2,
        2,
        1,
        0,
    ]
