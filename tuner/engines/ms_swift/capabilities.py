"""Megatron-SWIFT: megatron-core behind ms-swift's arguments and mcore-bridge's models.

Read from swift/megatron of the wheel ms-swift 4.6.0 and from mcore-bridge 1.6.5, which run
megatron-core 0.16 and later. It has the rules of megatron-core; of its settings it lacks those of
CUDA graphs, MemFine's chunks, HybridEP, overlapped expert communication, offloaded activations,
gradient buckets, copies of sharded state, the order of ranks and checkpoints on hosts.

Adapters (`LoraParallelLinear`, mcore_bridge/tuners/lora.py) refuse split experts. The matrix that
reads a layer's input is whole on every tensor rank, so ranks need not divide the adapter's rank. A
name of a layer (`linear_fc1`) covers dense networks, shared ones and experts alike.

Hybrids, whose layers and stages are one pattern of letters, are not planned.

No emitted file was started: the program needs a CUDA or NPU device.
"""

from dataclasses import replace
from typing import Final

from tuner.catalog.manifest import DEFAULT_RANK_ORDER
from tuner.catalog.target import LaunchFormat, Target
from tuner.engines.megatron_lm.capabilities import MEGATRON_0_18, saved_bytes
from tuner.engines.megatron_lm.mixers import HYBRIDS
from tuner.spec.features import ModelFeature
from tuner.spec.tune import EXPERTS, JOINED_INPUTS, NETWORK, QKV, SPLIT_INPUTS

MS_SWIFT_4_6: Final = replace(
    MEGATRON_0_18,
    names=("ms-swift",),
    release="4.6, megatron-core 0.16 and later",
    source="github.com/modelscope/ms-swift 4.6.0, mcore-bridge 1.6.5",
    shard_ranks_zero_stages=frozenset(),
    host_checkpoint_zero_stages=frozenset(),
    in_process_restart_zero_stages=frozenset(),
    background_checkpoint_zero_stages=frozenset({0, 1}),
    saves_before_time_limit=False,
    ddp_bucket_size=False,
    activation_offload=None,
    largest_chunks=1,
    rank_orders=frozenset({DEFAULT_RANK_ORDER}),
    dispatchers=frozenset({"alltoall", "allgather", "deepep"}),
    a2a_overlap=None,
    cuda_graphs=frozenset({"none"}),
    full_graph_dispatchers=frozenset(),
    adapters=frozenset({"lora"}),
    adapter_dtypes=frozenset({"bf16"}),
    adapter_limits=frozenset({("expert_tensor_parallel", False)}),
    fused_layers=frozenset({QKV, (*NETWORK, EXPERTS), JOINED_INPUTS, SPLIT_INPUTS}),
    unsupported=(MEGATRON_0_18.unsupported - {ModelFeature.QK_NORM_FULL}) | HYBRIDS,
)

TARGETS: Final = (
    Target(
        capabilities=MS_SWIFT_4_6,
        family="nemo",
        software="megatron-2025",
        memory_family="ms-swift",
        runs_same_layers=False,
        saved_bytes=saved_bytes,
    ),
)
FORMATS: Final = (
    LaunchFormat(
        name="ms-swift",
        suffixes=(".yaml", ".yml"),
        reader="read_yaml",
        recognised_by="holds_settings",
    ),
    LaunchFormat(name="ms-swift", recognised_by="starts"),
)
METRICS: Final = "ms-swift"
