"""Reads `vllm serve` and its older entry point.

Experts are split by EP over TP x DP ranks under --enable-expert-parallel, else by MoE-TP; batch
sizes are per data-parallel rank. Facts and their source:
tuner/engines/vllm/capabilities.py. Without experts data-parallel ranks are instances of their
own (vllm/config/parallel.py: only models with experts synchronise their ranks).
"""

import json
import re
from collections.abc import Iterator
from typing import Final

from tuner.config.serve import Role
from tuner.costs.serve.cache_capacity import GIB
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
    context_notes,
    context_ranks,
    memory_share,
    pipeline_stages,
    refuse_unpriced,
    spread_machines,
)
from tuner.engines.reading.serve_words import (
    ServerFlags,
    host_sizes,
    json_object,
    size_bytes,
    sorted_flags,
    tokens,
    with_json,
)
from tuner.engines.reading.weight_methods import weight_method
from tuner.engines.vllm.capabilities import TRAITS, VLLM_0_33
from tuner.errors import SpecError
from tuner.search.serve.demand import MOST_RUNNING

_CONTEXT: Final = "decode-context-parallel-size"
_INTERLEAVES: Final = ("dcp-kv-cache-interleave-size", "cp-kv-cache-interleave-size")
"""Tokens that go to a context rank in turn; the first overrides the other."""
SERVER: Final = ServerFlags(
    starts=(
        ("vllm", "serve"),
        ("vllm.entrypoints.openai.api_server",),
        ("dynamo.vllm",),
    ),
    # Their Dockerfiles' entry points; llm-d's routers and benchmarks are other images.
    images=(
        *("vllm-openai", "vllm-cpu-release-repo", "vllm-cuda-rhel", "vllm-rocm-rhel"),
        *("llm-d:", "llm-d-aws", "llm-d-cpu", "llm-d-cuda", "llm-d-hpu", "llm-d-rocm", "llm-d-xpu"),
    ),
    spellings={
        "tp": "tensor-parallel-size",
        "dp": "data-parallel-size",
        "pp": "pipeline-parallel-size",
        "ep": "enable-expert-parallel",
        "q": "quantization",
        "dpl": "data-parallel-size-local",
        "dpn": "data-parallel-rank",
        "dpr": "data-parallel-start-rank",
        "dpa": "data-parallel-address",
        "dpp": "data-parallel-rpc-port",
        "dcp": "decode-context-parallel-size",
        "pcp": "prefill-context-parallel-size",
        "n": "nnodes",
        "r": "node-rank",
        "sc": "speculative-config",
        "cc": "compilation-config",
        "O": "optimization-level",
    },
    switches=frozenset(
        {
            "async-scheduling",
            "disable-chunked-prefill",
            "disable-log-requests",
            "disable-expert-parallel",
            "disable-prefix-caching",
            "enable-auto-tool-choice",
            "enable-chunked-prefill",
            "enable-dbo",
            "enable-eplb",
            "enable-expert-parallel",
            "enable-prefix-caching",
            "enforce-eager",
            "headless",
            "language-model-only",
            "no-enable-chunked-prefill",
            "no-enable-expert-parallel",
            "no-enable-prefix-caching",
            "trust-remote-code",
        }
    ),
    read=frozenset(
        {
            "additional-config",
            "all2all-backend",
            "block-size",
            "data-parallel-size",
            "dcp-comm-backend",
            "decode-context-parallel-size",
            "disable-chunked-prefill",
            "disable-expert-parallel",
            "disable-prefix-caching",
            "disaggregation-mode",
            "enable-chunked-prefill",
            "enable-dbo",
            "enable-eplb",
            "enable-expert-parallel",
            "enable-prefix-caching",
            "enforce-eager",
            "eplb-config",
            "gpu-memory-utilization",
            "kv-cache-dtype",
            "kv-cache-memory-bytes",
            "kv-transfer-config",
            "language-model-only",
            "max-cudagraph-capture-size",
            "max-model-len",
            "max-num-batched-tokens",
            "max-num-seqs",
            "nnodes",
            "no-enable-chunked-prefill",
            "no-enable-expert-parallel",
            "no-enable-prefix-caching",
            "pipeline-parallel-size",
            "prefill-context-parallel-size",
            "quantization",
            "spec-method",
            "spec-tokens",
            "speculative-config",
            *("api-server-count", "stream-interval"),
            "tensor-parallel-size",
        }
    ),
    unpriced=frozenset(
        {
            *("O0", "O1", "O2", "O3", "optimization-level"),
            "async-scheduling",
            "compilation-config",
            "cpu-offload-gb",
            *("kv-offloading-backend", "kv-offloading-size", "swap-space"),
            "dcp-q-replicate",
            "dbo-decode-token-threshold",
            "dbo-prefill-token-threshold",
        }
    ),
    timeless=frozenset(
        {
            "kv-events-config",
            "api-key",
            "config",
            *_INTERLEAVES,
            "data-parallel-address",
            "data-parallel-rank",
            "data-parallel-rpc-port",
            "data-parallel-size-local",
            "data-parallel-start-rank",
            "disable-log-requests",
            "enable-auto-tool-choice",
            "enable-scale-out",
            "headless",
            "host",
            "master-addr",
            "master-port",
            "model",
            "node-rank",
            "port",
            "reasoning-parser",
            "served-model-name",
            "spec-model",
            "tokenizer",
            "tool-call-parser",
            "trust-remote-code",
        }
    ),
)

_ALL2ALL: Final = {
    "allgather_reducescatter": "allgather",
    "naive": "allgather",
    "deepep_high_throughput": "deepep_normal",
    "deepep_low_latency": "deepep_low_latency",
}
_UNPRICED_SPLITS: Final = {
    "prefill-context-parallel-size": "splits prompts over devices of their own"
}
"""0.33.0, config/parallel.py: the devices of an instance are TP x PP x PCP."""
OPTIONS: Final = ("config",)
"""Flags that name a file of options, which the command overrides."""
_JSON: Final = {
    "additional-config": None,
    "eplb-config": None,
    "kv-transfer-config": None,
    "speculative-config": None,
    "spec-method": ("speculative-config", "method"),
    "spec-tokens": ("speculative-config", "num_speculative_tokens"),
}
"""Flags that hold JSON, also in dotted parts, and those that state a key of one."""
_COPIES_SPELLED: Final = "eplb-config.num_redundant_experts"
"""Spelling that the engine takes: dashes become underscores only before the dot."""
_GRAPH_MODE: Final = re.compile(r"cudagraph_mode\W{1,8}(\w+)")
"""The mode inside JSON whose other parts may be variables without a value."""
_LONGEST_THAT_FITS: Final = ("auto", "-1")
"""Values of --max-model-len (utils/argparse_utils.py, `human_readable_int_or_auto`)."""
MOST_DRAFTS: Final = 16
_CACHES: Final = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_ds_mla": "fp8",
}
_CONNECTORS: Final = {
    "NixlConnector": "nixl",
    "NixlPullConnector": "nixl",
    "NixlPushConnector": "nixl_push",
    "MooncakeConnector": "mooncake",
}
"""Connectors by vLLM's names (0.33.0, kv_connector/factory.py); NixlConnector is another name of
NixlPullConnector."""
_AFD_ROLES: Final = {"attention": Role.ATTENTION, "ffn": Role.EXPERT}
"""Roles of vllm-project/afd-plugin (afd_plugin/config.py, SUPPORTED_AFD_ROLES)."""
_DYNAMO_ROLES: Final = {
    "agg": Role.AGGREGATED,
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
}
"""`--disaggregation-mode` of `python -m dynamo.vllm` (ai-dynamo 1.6.1, dynamo/common/backend)."""
_ROLES: Final = {
    "kv_producer": Role.PREFILL,
    "kv_consumer": Role.DECODE,
    "kv_both": Role.AGGREGATED,
}


def read(typed: Flags, around: Surroundings) -> ServingLaunch:
    """Read a launch.

    Raises:
        SpecError: flags that contradict each other, or have no price.
    """
    flags = with_json(typed, _JSON)
    has_experts = around.model.moe is not None
    tensor = flags.number("tensor-parallel-size") or 1
    data = flags.number("data-parallel-size") or 1
    stages = pipeline_stages(flags, "pipeline-parallel-size", around=around)
    check_heads(
        flags,
        "tensor-parallel-size",
        ranks=tensor,
        model_heads=around.model.attention.num_heads,
        factor=1,
    )
    is_whole = _is_on(flags, "expert-parallel", default=False) and has_experts
    cell = _cell(flags)
    own_experts = has_experts and cell.get("role") != "attention"
    refuse_unpriced(flags, _UNPRICED_SPLITS)
    context = context_ranks(flags, _CONTEXT, ranks=tensor, around=around)
    _check_context(flags, context)
    ranks = tensor * (data if has_experts else 1)
    degrees = InstanceDegrees(
        attention_tensor=tensor,
        attention_data=data if has_experts else 1,
        expert=tensor * data if own_experts and is_whole else 1,
        moe_tensor=tensor * data if own_experts and not is_whole else 1,
        pipeline=stages,
        stage_machines=spread_machines(flags, devices=ranks * stages, stages=stages, around=around),
    ).sharing(context, shares_side=TRAITS.shares_side_caches)
    ffn_devices = _ffn_devices(flags, cell, devices=degrees.devices)
    copies = 1 if has_experts else data
    check_devices(
        flags, "data-parallel-size", devices=degrees.devices, copies=copies, around=around
    )
    redundant = _redundant(flags, degrees)
    if own_experts or not has_experts:
        check_experts(
            flags,
            "enable-expert-parallel" if is_whole else "tensor-parallel-size",
            degrees,
            around,
            engine=VLLM_0_33,
            redundant=redundant,
            redundant_flag=_COPIES_SPELLED if is_whole else "",
            advice=" as --tensor-parallel-size times --data-parallel-size",
        )
    shortens = flags.values.get("max-model-len", ("",))[-1].lower() in _LONGEST_THAT_FITS
    length = None if shortens else tokens(flags, "max-model-len")
    check_length(flags, "max-model-len", length, around)
    running, step_tokens = _batches(flags, longest=length or around.model.max_position)
    usual = _usual_batches(around)
    draft_tokens, draft_method = _drafting(flags)
    weights = weight_method(flags, "quantization")
    return ServingLaunch(
        source=flags.source,
        engine="vllm",
        role=_role(flags, cell),
        ffn_devices=ffn_devices,
        setting=InstanceKnobs(
            degrees=degrees,
            running=running or usual[1],
            step_tokens=step_tokens or max(usual[0], running or usual[1]),
            is_chunked=_is_on(flags, "chunked-prefill", default=True),
            page_tokens=flags.number("block-size"),
            draft_tokens=draft_tokens,
            a2a_backend=_all_to_all(flags, degrees),
            two_batch_overlap=flags.is_on("enable-dbo"),
            graph_sequences=_captured(flags),
            streamed_tokens=_streamed(flags, ranks=degrees.attention_data),
            has_whole_graphs=_whole_graphs(flags),
            exchanges_outputs=_exchanges_outputs(flags, around),
            redundant_experts=redundant,
        ),
        copies=copies,
        connector=_connector(flags),
        environment=flags.environment,
        draft_method=draft_method,
        has_prefix_cache=_is_on(flags, "prefix-caching", default=True),
        memory_ratio=memory_share(flags, "gpu-memory-utilization"),
        cache_bytes=size_bytes(flags, "kv-cache-memory-bytes"),
        # Of all tensor and pipeline ranks together (config/vllm.py); LMCache's server has its own.
        host_bytes=host_sizes(
            flags,
            {
                "kv-offloading-size": 0.0
                if flags.word("kv-offloading-backend") == "lmcache"
                else GIB / (tensor * stages),
                "cpu-offload-gb": GIB,
                "swap-space": GIB,
            },
        ),
        max_model_len=length,
        shortens_length=shortens,
        is_text_only=flags.is_on("language-model-only"),
        quantization=weights.format,
        weight_bits=weights.bits,
        kv_cache_dtype=cache_format(flags, "kv-cache-dtype", _CACHES, around=around, traits=TRAITS),
        flags=sorted_flags(typed, SERVER),
        notes=(
            *flags.notes,
            *weights.notes,
            *_notes(flags, running=running or -usual[1], has_experts=has_experts, data=data),
            *context_notes(context, is_aggregated=_role(flags, cell) is Role.AGGREGATED),
        ),
    )


def _check_context(flags: Flags, context: int) -> None:
    """Refuse what the engine refuses beside context ranks (0.33.0, config/vllm.py)."""
    if context > 1 and flags.is_on("enable-dbo") and not VLLM_0_33.overlap_takes_context:
        raise SpecError(
            f"{flags.source}: --enable-dbo with --{_CONTEXT} {context} is refused by the engine;"
            " leave one of them out"
        )
    page, name = flags.number("block-size"), _INTERLEAVES[_INTERLEAVES[0] not in flags.values]
    tokens_in_turn = flags.number(name) or 1
    if context > 1 and page is not None and page % tokens_in_turn:
        raise SpecError(
            f"{flags.source}: --{name} {tokens_in_turn} does not divide --block-size {page}; the"
            f" nearest that does is {nearest_divisor(page, tokens_in_turn)}"
        )


def _exchanges_outputs(flags: Flags, around: Surroundings) -> bool:
    """Say whether context ranks pass outputs in one all-to-all, as models of GLM's do unasked."""
    usual = "a2a" if around.model.architecture == "GlmMoeDsaForCausalLM" else "ag_rs"
    return flags.choice("dcp-comm-backend", ("ag_rs", "a2a"), usual) == "a2a"


def _is_on(flags: Flags, feature: str, *, default: bool) -> bool:
    on = flags.is_on(f"enable-{feature}")
    off = flags.is_on(f"no-enable-{feature}") or flags.is_on(f"disable-{feature}")
    if on and off:
        raise SpecError(
            f"{flags.source}: --enable-{feature} and its opposite are both given; keep one, the"
            f" engine's default is {'on' if default else 'off'}"
        )
    return on or (default and not off)


def _batches(flags: Flags, *, longest: int) -> tuple[int | None, int | None]:
    running = flags.number("max-num-seqs")
    step_tokens = tokens(flags, "max-num-batched-tokens")
    if running is not None and step_tokens is not None and step_tokens < running:
        raise SpecError(
            f"{flags.source}: --max-num-batched-tokens {step_tokens} is below --max-num-seqs"
            f" {running}, which the engine refuses; the nearest is --max-num-batched-tokens"
            f" {running}"
        )
    is_chunked = _is_on(flags, "chunked-prefill", default=True)
    if not is_chunked and step_tokens is not None and step_tokens < longest:
        raise SpecError(
            f"{flags.source}: --disable-chunked-prefill needs --max-num-batched-tokens"
            f" {step_tokens} to reach the longest request; the nearest is {longest}, or a lower"
            " --max-model-len"
        )
    return running, step_tokens


def _captured(flags: Flags) -> int | None:
    """Return the sequences of the largest graph; 0 without graphs, None where nothing is said."""
    if flags.is_on("enforce-eager") or _graph_mode(flags) == "NONE":
        return 0
    max_tokens = flags.number("max-cudagraph-capture-size", least=0)
    return None if max_tokens is None else max_tokens // (_drafting(flags)[0] + 1)


def _streamed(flags: Flags, *, ranks: int) -> float:
    """Return tokens that are streamed at once; each rank has a process unless a launch says so."""
    processes = flags.number("api-server-count") or ranks
    return (flags.number("stream-interval") or 1) * processes / ranks


def _graph_mode(flags: Flags) -> str:
    """Return the stated mode of graphs; empty where none is, as where a level stands alone."""
    mode = _GRAPH_MODE.search(" ".join(flags.values.get("compilation-config", ())))
    return mode[1].upper() if mode else ""


def _whole_graphs(flags: Flags) -> bool | None:
    mode = _graph_mode(flags)
    return None if mode in ("", "FULL_AND_PIECEWISE") else mode.startswith("FULL")


def _usual_batches(around: Surroundings) -> tuple[int, int]:
    """Return tokens and sequences of a step where none are stated.

    By memory (0.33.0, `engine/arg_utils.py`, `get_batch_defaults`); A100 counts as small.
    """
    memory = around.memory_bytes
    if memory >= 160 * GIB:
        return 16_384, MOST_RUNNING
    is_large = memory >= 70 * GIB and not (around.pool.device or "").startswith("a100")
    return (8192, MOST_RUNNING) if is_large else (2048, 256)


def _cell(flags: Flags) -> dict[str, object]:
    """Return the AFD configuration of the launch; empty without one.

    Raises:
        SpecError: no such role.
    """
    if "additional-config" not in flags.values:
        return {}
    cell = json_object(flags, "additional-config").get("afd")
    if cell is None:
        return {}
    if not isinstance(cell, dict) or cell.get("role") not in _AFD_ROLES:
        raise SpecError(
            f"{flags.source}: --additional-config: afd {cell!r:.60} has no role of"
            f" {', '.join(_AFD_ROLES)}"
        )
    return cell


def _ffn_devices(flags: Flags, cell: dict[str, object], *, devices: int) -> int:
    """Return the devices of the FFN server of an attention server; 0 for other launches.

    Raises:
        SpecError: numbers of ranks that are none, or that are not those of the launch.
    """
    if not cell:
        return 0
    ranks = {}
    for name in ("num_attention_ranks", "num_ffn_ranks"):
        count = cell.get(name, 1)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise SpecError(
                f"{flags.source}: --additional-config: afd.{name} {count!r:.40} is no number of"
                " ranks; write a whole one from 1 on"
            )
        ranks[name] = count
    key = "num_attention_ranks" if cell["role"] == "attention" else "num_ffn_ranks"
    if ranks[key] != devices:
        raise SpecError(
            f"{flags.source}: --additional-config: afd.{key} {ranks[key]} is not the {devices}"
            " devices of --tensor-parallel-size times --data-parallel-size"
        )
    return ranks["num_ffn_ranks"] if cell["role"] == "attention" else 0


def _role(flags: Flags, cell: dict[str, object]) -> Role:
    """Return the role of the instance; Dynamo's workers state it beside a connector for both."""
    if cell:
        return _AFD_ROLES[str(cell["role"])]
    if "disaggregation-mode" in flags.values:
        return _DYNAMO_ROLES[flags.choice("disaggregation-mode", tuple(_DYNAMO_ROLES), "agg")]
    if "kv-transfer-config" not in flags.values:
        return Role.AGGREGATED
    role = json_object(flags, "kv-transfer-config").get("kv_role")
    if not isinstance(role, str) or role not in _ROLES:
        raise SpecError(
            f"{flags.source}: --kv-transfer-config: kv_role {role!r:.60} is none of"
            f" {', '.join(_ROLES)}"
        )
    return _ROLES[role]


def _connector(flags: Flags) -> str:
    if "kv-transfer-config" not in flags.values:
        return ""
    name = str(json_object(flags, "kv-transfer-config").get("kv_connector", ""))
    return _CONNECTORS.get(name, name)


def _drafting(flags: Flags) -> tuple[int, DraftMethod]:
    """Return drafted tokens and the draft method; 0 with a method that is not modelled.

    Raises:
        SpecError: the configuration is none.
    """
    if "speculative-config" not in flags.values:
        return 0, DraftMethod.MTP
    config = json_object(flags, "speculative-config")
    method, tokens_drafted = config.get("method"), config.get("num_speculative_tokens")
    if not isinstance(method, str) or tokens_drafted is None:
        return 0, DraftMethod.MTP
    if not isinstance(tokens_drafted, int) or not 1 <= tokens_drafted <= MOST_DRAFTS:
        raise SpecError(
            f"{flags.source}: --speculative-config: num_speculative_tokens"
            f" {tokens_drafted!r:.40} is not in 1..{MOST_DRAFTS}"
        )
    if method.startswith("eagle"):
        return tokens_drafted, DraftMethod.EAGLE
    return (tokens_drafted if method.endswith("mtp") else 0), DraftMethod.MTP


def _redundant(flags: Flags, degrees: InstanceDegrees) -> int:
    """Return the number of redundant experts.

    Raises:
        SpecError: they are no number, or the engine has none without its load balancer.
    """
    stated: object = 0
    if "eplb-config" in flags.values:
        stated = json_object(flags, "eplb-config").get("num_redundant_experts", 0)
    if isinstance(stated, str) and len(stated) <= 9 and stated.isdecimal():
        stated = int(stated)
    if type(stated) is not int or stated < 0:
        raise SpecError(
            f"{flags.source}: --eplb-config: num_redundant_experts {stated!r:.40} is no number of"
            " experts; the nearest is 0"
        )
    copies = stated
    if copies and not (flags.is_on("enable-eplb") and degrees.expert > 1):
        raise SpecError(
            f"{flags.source}: --{_COPIES_SPELLED} {copies} needs --enable-eplb and"
            " --enable-expert-parallel on several ranks; add them, or leave it out"
        )
    return copies


def _all_to_all(flags: Flags, degrees: InstanceDegrees) -> str:
    if degrees.attention_data == 1:
        return "none"
    return _ALL2ALL.get(flags.word("all2all-backend") or "", "allgather")


def _notes(flags: Flags, *, running: int, has_experts: bool, data: int) -> list[str]:
    notes = []
    if "kv-transfer-config" in flags.values and _role(flags, {}) is Role.AGGREGATED:
        notes.append("kv_role kv_both is read as an instance that prefills and decodes")
    if {"kv-cache-memory-bytes", "gpu-memory-utilization"} <= flags.values.keys():
        notes.append("--kv-cache-memory-bytes sets the cache, so --gpu-memory-utilization does not")
    if running < 0:
        notes.append(f"no --max-num-seqs: {-running} sequences a rank count")
    if "speculative-config" in flags.values and not _drafting(flags)[0]:
        notes.append(
            "--speculative-config has no price: it needs a method, mtp or eagle, and"
            " num_speculative_tokens; the weights, cache and states of its drafts are left out, so"
            " that the cache holds fewer tokens than said here"
        )
    if flags.word("all2all-backend") and not flags.is_on("enable-expert-parallel"):
        notes.append("--all2all-backend takes effect only under --enable-expert-parallel")
    graphs = flags.number("max-cudagraph-capture-size", least=0)
    if graphs is not None and running > 0 and graphs < running * (_drafting(flags)[0] + 1):
        notes.append(f"decode steps of more than {graphs} tokens wait for their kernels' launches")
    backend = flags.word("all2all-backend")
    if backend and backend not in _ALL2ALL:
        notes.append(f"--all2all-backend {backend[:40]} is priced as an all-to-all like DeepEP's")
    if data > 1 and not has_experts:
        notes.append(f"without experts --data-parallel-size {data} is {data} separate instances")
    if not has_experts and flags.is_on("enable-expert-parallel"):
        notes.append("--enable-expert-parallel changes nothing of a model without experts")
    return notes


LAUNCH_FLAGS: Final = {
    "memory_ratio": "--gpu-memory-utilization {:g}",
    "cache_bytes": "--kv-cache-memory-bytes {}",
    "kv_cache_dtype": "--kv-cache-dtype {}",
    "max_model_len": "--max-model-len {}",
    "is_chunked": "--enable-chunked-prefill",
}
"""Flags of a launch for settings that are no knob of an instance, by field of ServingLaunch."""


def knob_flags(
    setting: InstanceKnobs, *, role: Role, draft_method: DraftMethod, num_experts: int
) -> Iterator[tuple[str, str]]:
    """Yield the flags that a setting has, as a launch states them."""
    degrees = setting.degrees
    yield "--max-num-batched-tokens", str(setting.step_tokens)
    if setting.a2a_backend.startswith("deepep"):
        is_normal = setting.a2a_backend == "deepep_normal"
        yield "--all2all-backend", f"deepep_{'high_throughput' if is_normal else 'low_latency'}"
    if setting.two_batch_overlap:
        yield "--enable-dbo", ""
    if setting.draft_tokens:
        method = draft_method.value
        config = {"method": method, "num_speculative_tokens": setting.draft_tokens}
        yield "--speculative-config", f"'{json.dumps(config)}'"
    yield "--tensor-parallel-size", str(degrees.attention_tensor)
    if degrees.context > 1:
        yield f"--{_CONTEXT}", str(degrees.context)
    if degrees.pipeline > 1:
        yield "--pipeline-parallel-size", str(degrees.pipeline)
    if degrees.attention_data > 1:
        yield "--data-parallel-size", str(degrees.attention_data)
    if degrees.expert > 1:
        yield "--enable-expert-parallel", ""
    if setting.redundant_experts:
        yield "--enable-eplb", ""
        config = {"num_redundant_experts": setting.redundant_experts}
        yield "--eplb-config", f"'{json.dumps(config)}'"
    yield "--max-num-seqs", str(min(setting.running, MOST_RUNNING))
