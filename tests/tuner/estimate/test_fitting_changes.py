"""A launch that does not fit is told what would, wherever the search of plans finds anything."""

import time
from collections.abc import Callable
from typing import Final

from tuner.devices.datasheet import Generation
from tuner.engines.reading.launch import LaunchSettings
from tuner.estimate.changes import MOST_KNOBS
from tuner.estimate.configuration import build_configuration
from tuner.estimate.estimate import estimate, shipped_residuals
from tuner.estimate.knobs import knob_changes
from tuner.estimate.records import Estimate
from tuner.estimate.registry import read_text
from tuner.search.settings import SearchSettings
from tuner.search.train.build_problem import build_problem, price_pool
from tuner.search.train.search import search
from tuner.spec.cluster import Cluster
from tuner.spec.spec import Spec

MakeSpec = Callable[..., Spec]

MEGATRON: Final = (
    "torchrun --nproc_per_node 8 pretrain_gpt.py --micro-batch-size 1 --global-batch-size 256"
    " --seq-length 4096 --bf16 --hidden-dropout 0 --attention-dropout 0"
    " --moe-token-dispatcher-type alltoall"
)
TORCHTITAN: Final = (
    'training.local_batch_size = 8\ntraining.seq_len = 4096\nactivation_checkpoint.mode = "none"'
)
SEARCHED: Final = (
    ("llama-3.1-8b", 1, "a100-40gb", "megatron", MEGATRON),
    ("qwen2.5-32b", 1, "h100-sxm", "torchtitan", TORCHTITAN),
    (
        "llama-3.1-405b",
        16,
        "h100-sxm",
        "megatron",
        MEGATRON.replace("torchrun", "torchrun --nnodes 16"),
    ),
)
"""Launches that do not fit, of models that are planned in a few seconds."""


def read(text: str, engine: str = "megatron") -> LaunchSettings:
    return read_text(text, format_name=engine, source="launch")


def told(spec: Spec, text: str, engine: str = "megatron") -> Estimate:
    result = estimate(spec, read(text, engine), residuals=shipped_residuals())
    assert not result.fits
    return result


def finds_a_plan(spec: Spec) -> bool:
    problem = build_problem(spec, price_pool(spec.cluster.pools[0], residuals=shipped_residuals()))
    settings = SearchSettings(top=1, time_limit_s=60.0, clock=time.perf_counter)
    return search(problem, settings).solutions is not None


def test_a_change_fits_wherever_a_plan_does(spec_of: MakeSpec) -> None:
    targets = {"megatron": "megatron-lm", "torchtitan": "torchtitan"}
    for model, nodes, device, engine, text in SEARCHED:
        spec = spec_of(model, nodes=nodes, device=device)
        spec = spec.model_copy(update={"emit": (targets[engine],)})
        result = told(spec, text, engine)
        change = result.smallest_change
        assert finds_a_plan(spec), model
        assert change is not None, model
        assert change.peak_memory_bytes <= result.memory_limit_bytes
        assert len(change.what) <= MOST_KNOBS


def test_knobs_are_added_until_a_launch_fits(spec_of: MakeSpec) -> None:
    # 141 B parameters on 32 devices of 40 GB: state alone is 79 GB a device, even if all is split.
    spec = spec_of("mixtral-8x22b", nodes=4, device="a100-40gb")
    result = told(spec, MEGATRON.replace("torchrun", "torchrun --nnodes 4"))

    assert result.smallest_change is not None
    assert len(result.smallest_change.what) > 2
    assert result.smallest_change.peak_memory_bytes <= result.memory_limit_bytes
    assert result.best_pair is None


def test_a_change_that_fills_the_devices_is_named_where_none_leaves_as_much_as_a_plan(
    spec_of: MakeSpec,
) -> None:
    # The least that it can need is 6.57 GiB, which 0.95 of 6.92 GiB hold.
    spec, gib = spec_of("llama-3.1-8b", nodes=1), 2**30
    for memory_gib, fills in ((7.0, False), (6.88, True), (6.0, None)):
        (pool,) = spec.cluster.pools
        pool = pool.model_copy(update={"memory_per_device": int(memory_gib * gib)})
        result = told(spec.model_copy(update={"cluster": Cluster(pools=(pool,))}), MEGATRON)
        change = result.smallest_change
        assert (change is None) is (fills is None), memory_gib
        if change is not None:
            assert (change.peak_memory_bytes > result.memory_limit_bytes) is fills, memory_gib
            assert change.peak_memory_bytes <= result.memory_capacity_bytes


def test_cheap_changes_are_named_before_dear_ones(spec_of: MakeSpec) -> None:
    # Qwen3-30B-A3B ran out of memory on 8 x 80 GB with EP 8; offloading the optimizer, sums in bf16
    # with recomputation, or FSDP make it fit (NVIDIA/Megatron-LM issue 2762).
    spec = spec_of("qwen3-30b-a3b", nodes=1)
    launch = (
        f"{MEGATRON} --expert-model-parallel-size 8 --expert-tensor-parallel-size 1"
        " --use-distributed-optimizer"
    )
    result = told(spec, launch)

    assert result.smallest_change is not None
    assert result.smallest_change.lines == (
        "--optimizer-cpu-offload",
        "--use-precision-aware-optimizer",
    )
    assert "GiB a node" in result.smallest_change.what[0]
    assert -0.15 < result.smallest_change.gain_ratio < -0.05
    flags = [set(" ".join(one.lines).split()) for one in result.changes]
    assert any({"--grad-reduce-in-bf16", "--recompute-granularity"} <= one for one in flags)
    assert any("--use-megatron-fsdp" in one for one in flags)


def test_bf16_is_advised_where_its_flag_is_missing(spec_of: MakeSpec) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1, device="a100-40gb")
    launch = MEGATRON.replace(" --bf16", "") + " --tensor-model-parallel-size 8 --sequence-parallel"
    result = estimate(spec, read(launch), residuals=shipped_residuals())
    changes = [one for one in (result.smallest_change, *result.changes) if one]

    assert any("--bf16" in one.lines for one in changes)


def test_a_launch_that_fits_is_not_told_to_sum_gradients_in_bf16_or_to_offload(
    spec_of: MakeSpec,
) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1)
    text = f"{MEGATRON} --tensor-model-parallel-size 2 --sequence-parallel"
    result = estimate(
        spec, read(f"{text} --use-distributed-optimizer"), residuals=shipped_residuals()
    )
    assert result.fits
    pair = (result.best_pair,) if result.best_pair else ()
    lines = [line for one in (*result.changes, *pair) for line in one.lines]

    assert not {"--grad-reduce-in-bf16", "--optimizer-cpu-offload"} & set(lines)


def test_an_optimizer_that_does_not_shard_is_not_told_to(spec_of: MakeSpec) -> None:
    spec = spec_of("llama-3.1-8b", nodes=1)
    for optimizer, shards in (
        ("adam", True),
        ("lion", True),
        ("muon", False),
        ("dist_muon", False),
    ):
        own, _ = build_configuration(read(f"{MEGATRON} --optimizer {optimizer}"), spec)
        changes = knob_changes(own, spec.model, Generation.HOPPER)
        told_to_shard = any(change.apply(own).zero_stage > own.zero_stage for change in changes)
        assert told_to_shard == shards, optimizer
