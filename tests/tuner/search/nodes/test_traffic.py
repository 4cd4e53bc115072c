from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner.engines.testing import sample_decision, sample_verified
from tests.tuner.models import example_model
from tuner.prices.train.constants import Constants
from tuner.search.nodes.traffic import OVERLAPPED_RATIO, NodeTraffic, obstacle, traffic
from tuner.spec.accounting import (
    embedding_parameters,
    head_parameters,
    layer_parameters,
    one_expert_parameters,
)
from tuner.spec.cluster import Pool
from tuner.spec.model import ModelSpec

MIXTRAL = example_model("mixtral-8x7b")


def sent(model: ModelSpec, *, node: int = 8, **changes: Any) -> NodeTraffic:
    """Of a decision of two stages with a batch of 1,536 sequences of 4,096 tokens."""
    decision = sample_decision(**({"recompute_modules": ()} | changes))
    plan = sample_verified(model, decision, devices_per_node=node).plan
    return traffic(
        decision,
        present(plan.predicted),
        model=model,
        goal=plan.goal,
        pool=plan.cluster.pools[0],
        ranks=range(decision.pipeline_model_parallel_size),
    )


WIDE = {
    "data_parallel_size": 32,
    "expert_model_parallel_size": 8,
    "expert_data_parallel_size": 4,
}


def test_a_stage_of_four_nodes_by_hand() -> None:
    found = sent(MIXTRAL, **WIDE)
    assert (found.nodes_of_stage, found.groups, found.num_nodes) == (4, 2, 8)
    assert found.num_microbatches == 1536 // 32
    # 4,096 tokens of 4,096 wide vectors in bf16 from each of 8 devices
    assert found.hop_bytes == 8 * 4096 * 4096 * 2
    # All experts lie inside a node, so nothing is exchanged between nodes.
    assert found.block == 1
    assert found.all_to_all_bytes_S.tolist() == [0.0, 0.0]
    # ZeRO 1: a sum of 4-byte gradients and a gather of 2-byte weights; a ring counts both halves.
    layers = 16 * layer_parameters(MIXTRAL, 0)
    ends = np.array([embedding_parameters(MIXTRAL), head_parameters(MIXTRAL)])
    assert found.gradient_bytes_S == pytest.approx(3.0 * (layers + ends))
    assert found.block_gradient_bytes_S.tolist() == [0.0, 0.0]


def test_experts_over_two_nodes_are_exchanged_and_summed_apart() -> None:
    changes = {"expert_tensor_parallel_size": 2, "expert_data_parallel_size": 2}
    found = sent(MIXTRAL, **(WIDE | changes))
    assert found.block == 2
    # 16 layers, dispatch and combine forward and backward, 2 experts of a token over 2 nodes: one
    # copy of each of the 8 x 4,096 tokens to either node.
    assert found.all_to_all_bytes_S.tolist() == [16 * 4 * 8 * 4096 * 4096 * 2] * 2
    # A node holds half of the experts and sums them with the node at its place in the other block.
    experts = 16 * 8 * one_expert_parameters(MIXTRAL)
    assert found.block_gradient_bytes_S == pytest.approx(3.0 * experts / 2)


def test_recomputed_experts_are_exchanged_once_more() -> None:
    wide = WIDE | {"expert_tensor_parallel_size": 2, "expert_data_parallel_size": 2}
    once, again = sent(MIXTRAL, **wide), sent(MIXTRAL, recompute_modules=("moe",), **wide)
    assert again.all_to_all_bytes_S == pytest.approx(1.5 * once.all_to_all_bytes_S)
    hidden = sent(MIXTRAL, a2a_overlap=True, **wide)
    assert hidden.all_to_all_bytes_S == pytest.approx(OVERLAPPED_RATIO * once.all_to_all_bytes_S)


def test_a_merged_dispatch_sends_a_token_to_a_node_once() -> None:
    wide = WIDE | {"expert_tensor_parallel_size": 2, "expert_data_parallel_size": 2}
    plain, merged = sent(MIXTRAL, **wide), sent(MIXTRAL, dispatcher="deepep", **wide)
    # Of 2 of 8 experts on 2 nodes, a node has none with chance 4/8 * 3/7: it is sent 11/14 of the
    # tokens, where plain dispatch sends one copy of each on average.
    assert merged.all_to_all_bytes_S == pytest.approx(11 / 14 * plain.all_to_all_bytes_S)


def test_the_generic_share_of_overlapped_exchanges_is_the_models() -> None:
    (default,) = [one.default for one in fields(Constants) if one.name == "expert_overlapped_ratio"]
    assert default == OVERLAPPED_RATIO


def test_stages_that_share_a_node_hop_between_nodes_only() -> None:
    found = sent(
        MIXTRAL,
        pipeline_model_parallel_size=8,
        data_parallel_size=2,
        expert_model_parallel_size=2,
        stage_recompute=("selective",) * 8,
        chunks=(1,) * 8,
        pipeline_layout=(4,) * 8,
    )
    assert (found.nodes_of_stage, found.groups) == (1, 2)
    assert found.gradient_bytes_S.tolist() == [0.0, 0.0]
    # Hops recur once for every 8 micro-batches, the stages; the problem counts one per 2, its own.
    problem = found.problem(np.full((2, 2), 1e9))
    assert problem.rounds * found.hop_bytes == pytest.approx(768 / 8 * 2 * 4096 * 4096 * 2)


def test_sharded_gradients_are_summed_in_every_micro_batch() -> None:
    whole, sharded, all_sharded = (sent(MIXTRAL, zero_stage=n, **WIDE) for n in (1, 2, 3))
    # Bytes of a parameter: 4 + 2; 48 * 4 + 2; 48 * (4 + 2 * 2).
    assert sharded.gradient_bytes_S == pytest.approx(194 / 6 * whole.gradient_bytes_S)
    assert all_sharded.gradient_bytes_S == pytest.approx(384 / 6 * whole.gradient_bytes_S)


def test_sums_hide_behind_the_shortest_backward_pass() -> None:
    assert sent(MIXTRAL, **WIDE).hidden_s == 0.0
    # Every stage of the sample takes 0.2 s backward.
    assert sent(MIXTRAL, overlap_grad_reduce=True, **WIDE).hidden_s == pytest.approx(0.2)
    sharded = sent(MIXTRAL, overlap_grad_reduce=True, zero_stage=2, **WIDE)
    assert sharded.hidden_s == pytest.approx(48 * 0.2)


@each_row(
    ("changes", "node", "why"),
    [
        ({"rank_order": "tp-cp-ep-pp-dp"}, 8, "rank order tp-cp-ep-pp-dp puts stages inside nodes"),
        ({}, 6, "stages of 8 devices do not fill nodes of 6"),
        (
            {
                "data_parallel_size": 24,
                "expert_model_parallel_size": 12,
                "expert_data_parallel_size": 2,
            },
            8,
            "groups of 12 expert ranks do not fill nodes of 8",
        ),
    ],
)
def test_stages_that_fill_no_nodes_are_reported(
    changes: dict[str, Any], node: int, why: str
) -> None:
    pool = Pool(name="pool", device="h100-sxm", nodes=8, devices_per_node=node)
    assert obstacle(sample_decision(**changes), pool) == why
    with pytest.raises(ValueError, match=why):
        sent(MIXTRAL, node=node, **changes)


def test_dispatched_copies_of_latent_experts_have_the_latent_width() -> None:
    latent = MIXTRAL.model_copy(
        update={"moe": present(MIXTRAL.moe).model_copy(update={"latent_size": 1024})}
    )
    changes = WIDE | {"expert_tensor_parallel_size": 2, "expert_data_parallel_size": 2}
    found = sent(latent, **changes)
    # A copy of each of the 8 x 4,096 tokens to either node, as above, with 1,024 elements of 4,096;
    # stages still send whole ones.
    assert found.all_to_all_bytes_S.tolist() == [16 * 4 * 8 * 4096 * 1024 * 2] * 2
    assert found.hop_bytes == 8 * 4096 * 4096 * 2
