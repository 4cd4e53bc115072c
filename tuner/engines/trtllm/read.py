"""Reads `trtllm-serve` with its options file, or only that file.

`serve` is the program's default command (commands/serve.py, DefaultGroup).

`tensor_parallel_size` counts all devices of a pipeline stage, each of which is a rank of attention
under `enable_attention_dp`. Without expert degrees they are split by MoE-TP over all devices
(llmapi/llm_args.py, TorchLlmArgs). The command does not state the role of an instance: one with a
`cache_transceiver_config` prefills if its scheduler does not overlap, as the engine requires of
prefill instances (docs/source/features/disagg-serving.md), and decodes otherwise. Facts and their
source: tuner/engines/trtllm/capabilities.py.

Not covered: the TensorRT backend; all-to-alls that the engine chooses by itself, which are priced
as all-gather.
"""

from collections.abc import Iterator
from typing import Final

from tuner.config.serve import Role
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.speculative import DraftMethod
from tuner.engines.reading.arguments import Flags
from tuner.engines.reading.nearest import nearest_divisor
from tuner.engines.reading.serve_launch import InstanceKnobs, ServingLaunch, Surroundings
from tuner.engines.reading.serve_split import (
    cache_format,
    check_devices,
    check_experts,
    check_heads,
    check_length,
    memory_share,
    pipeline_stages,
    refuse_unpriced,
)
from tuner.engines.reading.serve_words import ServerFlags, host_sizes, sorted_flags, tokens
from tuner.engines.trtllm.capabilities import TRAITS, TRTLLM_1_3
from tuner.errors import SpecError
from tuner.search.serve.demand import MOST_RUNNING

OPTIONS: Final = ("config", "extra-llm-api-options", "extra-engine-args")
"""Flags that name a file of options."""
FILE_COUNTS: Final = True
"""The file overrides the command."""
BALANCERS: Final = ("moe-config.load-balancer",)
"""Options whose mapping may be in a further file."""
_TENSOR: Final = "tensor-parallel-size"
_SLOTS: Final = "moe-config.load-balancer.num-slots"
_MEMORY: Final = "kv-cache-config.free-gpu-memory-fraction"
_HOST_CACHE: Final = "kv-cache-config.host-cache-size"
_GRAPHS: Final = "cuda-graph-config"
_STREAMED: Final = "stream-interval"
_PADDING: Final = "cuda-graph-config.enable-padding"
UNPADDED: Final = 32  # Every size up to it has a graph of its own.
_BALANCE: Final = "attention-dp-config.enable-balance"
"""Off by default, with 50 and 10 steps of waiting (llmapi/llm_args.py, AttentionDpConfig)."""
_PREFIXES: Final = "attention-dp-config.enable-kv-cache-aware-routing"
_DRAFTS: Final = "speculative-config.max-draft-len"
_METHOD: Final = "speculative-config.decoding-type"
USUAL_BATCH: Final = 2048
USUAL_TOKENS: Final = 8192
"""`max_batch_size` and `max_num_tokens` where nothing states them (TorchLlmArgs)."""

_ROUTING: Final = (
    *("account-for-in-transfer", "cold-start-warmup", "conversation-affinity"),
    *("fair-share-multiplier", "load-balance-weight", "match-rate-threshold"),
    *("max-sessions", "new-conv-placement"),
)
"""Details of `enable_kv_cache_aware_routing`; affinity counts on ids that a client sends."""

SERVER: Final = ServerFlags(
    starts=(("trtllm-serve",), ("dynamo.trtllm",)),
    other_verbs=("disaggregated", "disaggregated_mpi_worker", "mm_embedding_serve", "embedding"),
    takes_prefixes=False,
    spellings={
        "tp-size": _TENSOR,
        "pp-size": "pipeline-parallel-size",
        "cp-size": "context-parallel-size",
        "ep-size": "moe-expert-parallel-size",
        "kv-cache-dtype": "kv-cache-config.dtype",
        "kv-cache-free-gpu-memory-fraction": _MEMORY,
        "free-gpu-memory-fraction": _MEMORY,
    },
    switches=frozenset(
        {
            *("enable-attention-dp", "enable-chunked-prefill", "publish-kv-events"),
            *("fail-fast-on-attention-window-too-large", "trust-remote-code"),
        }
    ),
    read=frozenset(
        {
            *OPTIONS,
            _TENSOR,
            _SLOTS,
            *BALANCERS,
            _MEMORY,
            _GRAPHS,
            _PADDING,
            _STREAMED,
            _BALANCE,
            _PREFIXES,
            _DRAFTS,
            _METHOD,
            "cache-transceiver-config",
            "cache-transceiver-config.backend",
            "cache-transceiver-config.transceiver-runtime",
            "context-parallel-size",
            "cuda-graph-config.max-batch-size",
            "disable-overlap-scheduler",
            "disaggregation-mode",
            "enable-attention-dp",
            "enable-chunked-prefill",
            "kv-cache-config.dtype",
            "kv-cache-config.tokens-per-block",
            "max-batch-size",
            "max-num-tokens",
            "max-seq-len",
            "moe-expert-parallel-size",
            "moe-tensor-parallel-size",
            "pipeline-parallel-size",
        }
    ),
    unpriced=frozenset(
        {
            _HOST_CACHE,
            "attention-dp-config.batching-wait-iters",
            *(f"attention-dp-config.kv-cache-routing-{name}" for name in _ROUTING),
            "attention-dp-config.timeout-iters",
            "moe-config.backend",
            "moe-config.load-balancer.layer-updates-per-iter",
        }
    ),
    timeless=frozenset(
        {
            "backend",
            "gpus-per-node",
            "host",
            "model",
            "port",
            "publish-kv-events",
            "served-model-name",
            "tokenizer",
            "trust-remote-code",
        }
    ),
)

_CACHES: Final = {"bfloat16": "bf16", "fp8": "fp8"}
_METHODS: Final = {"MTP": DraftMethod.MTP, "Eagle": DraftMethod.EAGLE, "Eagle3": DraftMethod.EAGLE}
_ALL2ALL: Final = {
    "ALLGATHER": "allgather",
    "DEEPEP": "deepep_normal",
    "DEEPEPLOWLATENCY": "deepep_low_latency",
}
"""All-to-all backends by the values of TRTLLM_FORCE_COMM_METHOD."""
_ROLES: Final = {
    "agg": Role.AGGREGATED,
    "pd": Role.AGGREGATED,
    "prefill_and_decode": Role.AGGREGATED,
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
}
"""`--disaggregation-mode` of `python -m dynamo.trtllm` (ai-dynamo 1.6.1, trtllm/constants.py)."""


def read(flags: Flags, around: Surroundings) -> ServingLaunch:
    """Read a launch.

    Raises:
        SpecError: options that contradict each other, or have no price.
    """
    refuse_unpriced(flags, {"context-parallel-size": "splits sequences over devices of their own"})
    degrees = _degrees(flags, around)
    check_heads(
        flags,
        _TENSOR,
        ranks=degrees.attention_tensor,
        model_heads=around.model.attention.num_heads,
        factor=1,
    )
    check_devices(flags, _TENSOR, devices=degrees.devices, copies=1, around=around)
    redundant = _redundant(flags, around)
    named = "moe-expert-parallel-size" if degrees.expert > 1 else _TENSOR
    check_experts(
        flags, named, degrees, around, engine=TRTLLM_1_3, redundant=redundant, redundant_flag=_SLOTS
    )
    length = tokens(flags, "max-seq-len")
    check_length(flags, "max-seq-len", length, around)
    running = flags.number("max-batch-size") or min(USUAL_BATCH, MOST_RUNNING)
    return ServingLaunch(
        source=flags.source,
        engine="trtllm",
        role=_role(flags),
        setting=InstanceKnobs(
            degrees=degrees,
            running=running,
            step_tokens=tokens(flags, "max-num-tokens") or USUAL_TOKENS,
            is_chunked=flags.is_on("enable-chunked-prefill"),
            page_tokens=flags.number("kv-cache-config.tokens-per-block"),
            draft_tokens=flags.number(_DRAFTS, least=0) or 0,
            a2a_backend=_all_to_all(flags, degrees),
            graph_sequences=_captured(flags),
            graphed_sequences=_graphed(flags),
            streamed_tokens=flags.number(_STREAMED) or 1,
            aligns_prompts=flags.is_on(_BALANCE),
            redundant_experts=redundant,
        ),
        finds_ranks=flags.is_on(_PREFIXES),
        host_bytes=host_sizes(flags, {_HOST_CACHE: 1.0}),
        draft_method=_METHODS.get(flags.word(_METHOD) or "", DraftMethod.MTP),
        memory_ratio=memory_share(flags, _MEMORY),
        max_model_len=length,
        kv_cache_dtype=cache_format(
            flags, "kv-cache-config.dtype", _CACHES, around=around, traits=TRAITS
        ),
        flags=sorted_flags(flags, SERVER),
        notes=(*flags.notes, *_notes(flags)),
    )


def _degrees(flags: Flags, around: Surroundings) -> InstanceDegrees:
    ranks = flags.number(_TENSOR) or 1
    is_data = flags.is_on("enable-attention-dp")
    expert = flags.number("moe-expert-parallel-size")
    sliced = flags.number("moe-tensor-parallel-size")
    if around.model.moe is None:
        expert = sliced = 1
    elif ranks % (expert or sliced or 1):
        given = expert or sliced or 1
        raise SpecError(
            f"{flags.source}: {given} ranks of experts do not divide --{_TENSOR} {ranks}; the"
            f" nearest that do are {nearest_divisor(ranks, given)}"
        )
    elif expert is None:
        expert = ranks // sliced if sliced else 1
    sliced = sliced or ranks // (expert or 1)
    if around.model.moe is not None and (expert or 1) * sliced != ranks:
        raise SpecError(
            f"{flags.source}: --moe-tensor-parallel-size {sliced} x --moe-expert-parallel-size"
            f" {expert} is not --{_TENSOR} {ranks}; leave one of them out"
        )
    return InstanceDegrees(
        attention_tensor=1 if is_data else ranks,
        attention_data=ranks if is_data else 1,
        expert=expert or 1,
        moe_tensor=sliced,
        pipeline=pipeline_stages(flags, "pipeline-parallel-size", around=around),
    )


def _redundant(flags: Flags, around: Surroundings) -> int:
    """Return the slots of a layer beyond one for each expert.

    Raises:
        SpecError: there are fewer slots than experts.
    """
    slots, moe = flags.number(_SLOTS), around.model.moe
    if slots is None or moe is None:
        return 0
    if slots < moe.num_experts:
        raise SpecError(
            f"{flags.source}: --{_SLOTS} {slots} hold not each of {moe.num_experts} experts; the"
            f" nearest is {moe.num_experts}"
        )
    return slots - moe.num_experts


def _role(flags: Flags) -> Role:
    if "disaggregation-mode" in flags.values:
        return _ROLES[flags.choice("disaggregation-mode", tuple(_ROLES), "prefill_and_decode")]
    if not any(name.startswith("cache-transceiver-config") for name in flags.values):
        return Role.AGGREGATED
    return Role.PREFILL if flags.is_on("disable-overlap-scheduler") else Role.DECODE


def _captured(flags: Flags) -> int:
    """Return the sequences of the largest graph (`CudaGraphConfig`); 0 without graphs."""
    if flags.values.get(_GRAPHS) == ("null",):
        return 0
    return flags.number("cuda-graph-config.max-batch-size", least=0) or 128


def _graphed(flags: Flags) -> int:
    """Return the sequences up to which every decode step has a graph.

    Without padding a batch needs a graph of its own size: those to 32, then powers of two
    (`_generate_cuda_graph_batch_sizes` of llmapi/llm_args.py, 1.0 to 1.3.0rc27).
    """
    captured = _captured(flags)
    return captured if flags.is_on(_PADDING) else min(captured, UNPADDED)


def _all_to_all(flags: Flags, degrees: InstanceDegrees) -> str:
    if degrees.attention_data == 1:
        return "none"
    return _ALL2ALL.get(flags.environment.get("TRTLLM_FORCE_COMM_METHOD", ""), "allgather")


def _notes(flags: Flags) -> list[str]:
    notes = []
    forced = flags.environment.get("TRTLLM_FORCE_COMM_METHOD", "ALLGATHER")
    if forced not in _ALL2ALL:
        notes.append(f"TRTLLM_FORCE_COMM_METHOD {forced[:40]} is priced as all-gather")
    if flags.word(_METHOD) not in (None, *_METHODS):
        notes.append(f"speculative_config of type {str(flags.word(_METHOD))[:40]} is priced as MTP")
    return notes


LAUNCH_FLAGS: Final = {
    "memory_ratio": "kv_cache_config: {{free_gpu_memory_fraction: {:g}}}",
    "kv_cache_dtype": "kv_cache_config: {{dtype: {}}}",
    "max_model_len": "max_seq_len: {}",
    "is_chunked": "enable_chunked_prefill: true",
}
"""Keys of a launch for settings that are no knob of an instance, by field of ServingLaunch."""


def knob_flags(
    setting: InstanceKnobs, *, role: Role, draft_method: DraftMethod, num_experts: int
) -> Iterator[tuple[str, str]]:
    """Yield the flags that a setting has, as a launch states them."""
    degrees = setting.degrees
    yield "tensor_parallel_size:", str(degrees.devices // degrees.pipeline)
    if degrees.pipeline > 1:
        yield "pipeline_parallel_size:", str(degrees.pipeline)
    yield "enable_attention_dp:", str(degrees.attention_data > 1).lower()
    if num_experts:
        yield "moe_tensor_parallel_size:", str(degrees.moe_tensor)
        yield "moe_expert_parallel_size:", str(degrees.expert)
        if setting.redundant_experts:
            slots = num_experts + setting.redundant_experts
            yield "moe_config.load_balancer.num_slots:", str(slots)
    yield "max_num_tokens:", str(setting.step_tokens)
    for method, backend in _ALL2ALL.items():
        if backend == setting.a2a_backend:
            yield "TRTLLM_FORCE_COMM_METHOD", method
    if setting.draft_tokens:
        yield "speculative_config.max_draft_len:", str(setting.draft_tokens)
    yield "max_batch_size:", str(min(setting.running, MOST_RUNNING))
