"""Copies of the sharded state (HSDP, MiCS) and orders of ranks reach the decision of a launch."""

import json
from collections.abc import Callable
from pathlib import Path

from tuner.estimate.configuration import build_configuration
from tuner.estimate.decision import to_decision
from tuner.estimate.estimate import estimate, pricing_setup
from tuner.estimate.prices import price_configurations
from tuner.estimate.registry import read_launch, read_text
from tuner.spec.spec import Spec

HSDP = """
[training]
local_batch_size = 4
seq_len = 4096
[parallelism]
data_parallel_replicate_degree = {copies}
data_parallel_shard_degree = {shard}
"""
MEGATRON = (
    "torchrun --nnodes 4 --nproc-per-node 8 pretrain_gpt.py --pipeline-model-parallel-size 2"
    " --expert-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 256 --bf16"
    " --seq-length 4096 --use-distributed-optimizer --moe-token-dispatcher-type alltoall"
    " --hidden-dropout 0 --attention-dropout 0 "
)


def test_copies_of_hsdp_reach_the_decision_and_the_price(spec_of: Callable[..., Spec]) -> None:
    spec = spec_of("llama-3.1-8b", nodes=4)
    steps = {}
    for copies in (1, 4):
        text = HSDP.format(copies=copies, shard=32 // copies)
        launch = read_text(text, format_name="torchtitan", source="hsdp.toml")
        own, _ = build_configuration(launch, spec)
        decision = to_decision(own, spec.model)
        assert decision.num_state_copies == copies
        assert decision.shard_ranks == (None if copies == 1 else 8)
        (price,) = price_configurations((own,), pricing_setup(spec, None))
        steps[copies] = price.peak_bytes_P.max()
    # Four copies of the state take more memory than one.
    assert steps[4] > steps[1]


def test_mics_is_held_against_the_manifest(tmp_path: Path, spec_of: Callable[..., Spec]) -> None:
    path = tmp_path / "ds.json"
    settings = {
        "train_batch_size": 256,
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "mics_shard_size": 8},
    }
    path.write_text(json.dumps(settings))
    result = estimate(spec_of("llama-3.1-8b", nodes=4), read_launch(str(path)))
    assert result.decision.shard_ranks == 8
    assert any("shard_ranks" in refusal for refusal in result.refused_by)


def test_megatrons_copies_and_order_of_ranks_are_read(spec_of: Callable[..., Spec]) -> None:
    spec = spec_of("qwen3-30b-a3b", nodes=4)
    result = {}
    for more, copies, order in (
        ("", 1, "tp-cp-ep-dp-pp"),
        ("--num-distributed-optimizer-instances 4", 4, "tp-cp-ep-dp-pp"),
        ("--use-tp-pp-dp-mapping", 1, "tp-cp-ep-pp-dp"),
    ):
        own, _ = build_configuration(read_launch(MEGATRON + more), spec)
        decision = to_decision(own, spec.model)
        assert (decision.num_state_copies, decision.rank_order) == (copies, order), more
        (price,) = price_configurations((own,), pricing_setup(spec, None))
        result[more] = price.step_s
    # With pipeline ranks inside, data-parallel groups span servers: the order has a price.
    assert len(set(result.values())) == 3


def test_block_recomputation_counts_the_layers_of_every_model_chunk(
    spec_of: Callable[..., Spec],
) -> None:
    # 48 layers, PP 2, two model chunks a rank: 12 layers each, of which 3 are recomputed.
    more = (
        "--num-virtual-stages-per-pipeline-rank 2 --recompute-granularity full"
        " --recompute-method block --recompute-num-layers 3"
    )
    spec = spec_of("qwen3-30b-a3b", nodes=4)
    own, _ = build_configuration(read_launch(MEGATRON + more), spec)
    assert own.recompute_ratio == 0.25
    assert to_decision(own, spec.model).recompute_num_layers == 3
