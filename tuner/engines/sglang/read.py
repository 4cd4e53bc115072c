"""Reads `python -m sglang.launch_server`.

--tp-size counts all devices of an instance; --attn-dp-size is the attention data parallelism. The
engine divides --max-running-requests and --chunked-prefill-size by them. --dp-size without
--enable-dp-attention starts that many instances. DeepEP spreads experts over --tp-size whatever
--ep-size says. Facts and their source: tuner/engines/sglang/capabilities.py.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tuner.config.serve import Role
from tuner.costs.serve.cache_capacity import GIB
from tuner.costs.serve.decoder import LATENT_KINDS
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.reserve import MIB
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
from tuner.engines.reading.serve_words import ServerFlags, host_sizes, sorted_flags, tokens
from tuner.engines.reading.weight_methods import weight_method
from tuner.engines.sglang.capabilities import SGLANG_0_5_23, STATE_SLOTS, TRAITS
from tuner.errors import SpecError
from tuner.search.serve.choices import BUDGETS
from tuner.search.serve.demand import MOST_RUNNING
from tuner.units import parse_whole

_ALGORITHMS: Final = ("NEXTN", "EAGLE", "EAGLE3")
_DRAFTING: Final = (
    "speculative-num-steps",
    "speculative-eagle-topk",
    "speculative-num-draft-tokens",
)
USUAL_DRAFTS: Final = 3
"""Draft steps that the engine chooses for models with MTP heads
(sglang/srt/server_args.py, `auto_choose_speculative_params`)."""
MANY_DEVICES: Final = 4
LEAST_ACTIVE: Final = 2048
LARGE_BYTES: Final = 60.0 * GIB
LARGE_RESERVE: Final = 10.0 * GIB
MANY_CAPTURED: Final = 300
PROMPT_GRAPHS: Final = 58
"""Prompt lengths that are captured up to 8,192 tokens (`cuda_graph_hook.py`)."""
_CONTEXT_BACKENDS: Final = ("ag_rs", "a2a", "fi_a2a")
_UNPRICED_SPLITS: Final = {
    "attn-cp-size": "splits prompts over ranks of attention",
    "moe-dp-size": "gives groups of ranks their own experts",
    "dwdp-size": "gathers experts' weights for prompts",
    "enable-prefill-cp": "splits prompts over ranks of attention",
    "enable-prefill-context-parallel": "splits prompts over ranks of attention",
    "enable-nsa-prefill-context-parallel": "splits prompts over ranks of attention",
    "enable-dsa-prefill-context-parallel": "splits prompts over ranks of attention",
    "enable-dsa-cache-layer-split": "splits the cache's layers over ranks",
    "enable-kv-cache-sharding": "splits the cache's pages over ranks",
}
"""0.5.23, arg_groups/fields/parallel.py, and spellings of earlier releases."""
SERVER: Final = ServerFlags(
    starts=(
        ("sglang.launch_server",),
        ("launch_server.py",),
        ("sglang", "serve"),
        ("dynamo.sglang",),
    ),
    spellings={
        "tp": "tp-size",
        "tensor-parallel-size": "tp-size",
        "dp": "dp-size",
        "data-parallel-size": "dp-size",
        "attention-data-parallel-size": "attn-dp-size",
        "attention-context-parallel-size": "attn-cp-size",
        "decode-context-parallel-size": "dcp-size",
        "moe-data-parallel-size": "moe-dp-size",
        "nccl-init-addr": "dist-init-addr",
        "speculative-draft-model": "speculative-draft-model-path",
        "pp": "pp-size",
        "pipeline-parallel-size": "pp-size",
        "ep": "ep-size",
        "expert-parallel-size": "ep-size",
        "model": "model-path",
        "cuda-graph-max-bs": "cuda-graph-max-bs-decode",
        "cuda-graph-bs": "cuda-graph-bs-decode",
        "disable-cuda-graph-decode": "disable-cuda-graph",
    },
    switches=frozenset(
        {
            "disable-cuda-graph",
            "dcp-replicate-q-proj",
            "disable-overlap-schedule",
            "disable-radix-cache",
            *(name for name in _UNPRICED_SPLITS if name.startswith("enable-")),
            "enable-deepep-moe",
            "enable-dp-attention",
            "enable-dp-lm-head",
            "enable-ep-moe",
            "enable-eplb",
            "enable-hierarchical-cache",
            "enable-metrics",
            "enable-mixed-chunk",
            "enable-pdmux",
            "enable-torch-compile",
            "enable-two-batch-overlap",
            "language-model-only",
            "trust-remote-code",
        }
    ),
    read=frozenset(
        {
            "attn-dp-size",
            "chunked-prefill-size",
            "context-length",
            "cuda-graph-bs-decode",
            "cuda-graph-max-bs-decode",
            *_UNPRICED_SPLITS,
            *("dcp-comm-backend", "dcp-size"),
            "deepep-mode",
            "disable-cuda-graph",
            "disable-radix-cache",
            "disaggregation-mode",
            "disaggregation-transfer-backend",
            "dp-size",
            "enable-deepep-moe",
            "enable-dp-attention",
            "enable-eplb",
            "enable-two-batch-overlap",
            "ep-num-redundant-experts",
            "ep-size",
            "kv-cache-dtype",
            "language-model-only",
            "mamba-full-memory-ratio",
            "max-mamba-cache-size",
            "max-prefill-tokens",
            "nnodes",
            "max-running-requests",
            "max-total-tokens",
            "mem-fraction-static",
            "moe-a2a-backend",
            "page-size",
            "pp-size",
            "quantization",
            *_DRAFTING,
            "speculative-algorithm",
            "tp-size",
        }
    ),
    unpriced=frozenset(
        {
            "attention-backend",
            "cpu-offload-gb",
            "dcp-replicate-q-proj",
            *("enable-hierarchical-cache", "hicache-ratio", "hicache-size"),
            "disable-overlap-schedule",
            "enable-ep-moe",
            "enable-mixed-chunk",
            "enable-pdmux",
            "enable-torch-compile",
            "ep-dispatch-algorithm",
            "init-expert-location",
            "mamba-radix-cache-strategy",
            "moe-runner-backend",
            "num-continuous-decode-steps",
            "pdmux-config-path",
            "schedule-conservativeness",
            "schedule-policy",
            "sm-group-num",
            "stream-interval",
        }
    ),
    timeless=frozenset(
        {
            "kv-events-config",
            "api-key",
            "dist-init-addr",
            "disaggregation-bootstrap-port",
            "enable-metrics",
            "host",
            "model-path",
            "node-rank",
            "port",
            "reasoning-parser",
            "served-model-name",
            "config",
            "speculative-draft-model-path",
            "tokenizer-path",
            "tool-call-parser",
            "trust-remote-code",
        }
    ),
)

_BY_MEMORY: Final = (
    (20 * GIB, 2048, (8, 8)),
    (35 * GIB, 4096, (48, 160)),
    (60 * GIB, 4096, (32, 160)),
    (160 * GIB, 8192, (256, 512)),
    (math.inf, 16_384, (512, 512)),
)
"""Tokens of a chunk over all data ranks, and sequences of the largest decode graph on fewer than
four devices and on more, of devices below a size (0.5.23, `arg_groups/memory_hook.py`)."""
OPTIONS: Final = ("config",)
"""Flags that name a file of options, which the command overrides."""
_CACHES: Final = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
}
_ROLES: Final = {"null": Role.AGGREGATED, "prefill": Role.PREFILL, "decode": Role.DECODE}


def read(flags: Flags, around: Surroundings) -> ServingLaunch:
    """Read a launch.

    Raises:
        SpecError: flags that contradict each other, or have no price.
    """
    devices = flags.number("tp-size") or 1
    stages = pipeline_stages(flags, "pp-size", around=around)
    data, copies = _data(flags, devices=devices)
    check_heads(
        flags,
        "tp-size",
        ranks=devices // data,
        model_heads=around.model.attention.num_heads,
        factor=data,
    )
    whole = devices * stages
    check_devices(flags, "tp-size", devices=whole, copies=copies, around=around)
    degrees = _experts(flags, devices=devices, data=data, around=around)
    refuse_unpriced(flags, _UNPRICED_SPLITS)
    context = context_ranks(flags, "dcp-size", ranks=degrees.attention_tensor, around=around)
    machines = spread_machines(flags, devices=whole, stages=stages, around=around)
    degrees = replace(degrees, pipeline=stages, stage_machines=machines)
    degrees = degrees.sharing(context, shares_side=TRAITS.shares_side_caches)
    redundant = flags.number("ep-num-redundant-experts", least=0) or 0
    named = "ep-size" if degrees.expert > 1 else "tp-size"
    check_experts(
        flags,
        named,
        degrees,
        around,
        engine=SGLANG_0_5_23,
        redundant=redundant,
        redundant_flag="ep-num-redundant-experts",
    )
    length = tokens(flags, "context-length")
    check_length(flags, "context-length", length, around)
    running = _running(flags, data=data)
    kept = _kept_states(flags, data=data) if around.model.linear is not None else None
    if kept is not None:
        running = min(running or MOST_RUNNING, kept)
    role = _ROLES[flags.choice("disaggregation-mode", tuple(_ROLES), "null")]
    step_tokens, is_chunked = _prompts(flags, data=data)
    weights = weight_method(flags, "quantization")
    return ServingLaunch(
        source=flags.source,
        engine="sglang",
        role=role,
        connector=flags.values.get("disaggregation-transfer-backend", ("",))[-1],
        environment=flags.environment,
        setting=InstanceKnobs(
            degrees=degrees,
            running=running or MOST_RUNNING,
            # A decode instance reads no prompts, so the least that is planned for counts.
            step_tokens=BUDGETS[0]
            if role is Role.DECODE
            else step_tokens or max(_usual_chunk(around) // data, 1),
            is_chunked=is_chunked,
            page_tokens=flags.number("page-size"),
            draft_tokens=_drafts(flags),
            a2a_backend=_all_to_all(flags, degrees),
            two_batch_overlap=flags.is_on("enable-two-batch-overlap"),
            graph_sequences=_captured(flags),
            exchanges_outputs=flags.choice("dcp-comm-backend", _CONTEXT_BACKENDS, "a2a") != "ag_rs",
            redundant_experts=redundant,
        ),
        copies=copies,
        draft_method=_draft_method(flags, around),
        has_prefix_cache=not flags.is_on("disable-radix-cache"),
        memory_ratio=memory_share(flags, "mem-fraction-static"),
        host_bytes=host_sizes(flags, {"hicache-size": 1e9, "cpu-offload-gb": GIB}),
        host_cache_ratio=_host_cache_ratio(flags),
        most_cached_tokens=tokens(flags, "max-total-tokens"),
        state_ratio=_state_ratio(flags, around),
        max_model_len=length,
        is_text_only=flags.is_on("language-model-only"),
        quantization=weights.format,
        weight_bits=weights.bits,
        kv_cache_dtype=cache_format(flags, "kv-cache-dtype", _CACHES, around=around, traits=TRAITS),
        flags=sorted_flags(flags, SERVER),
        notes=(
            *flags.notes,
            *weights.notes,
            *_notes(flags, degrees, running=running, copies=copies),
            *context_notes(context, is_aggregated=role is Role.AGGREGATED),
            *(_state_notes(flags, kept=kept) if around.model.linear is not None else ()),
        ),
    )


def _host_cache_ratio(flags: Flags) -> float:
    """Return the host's pool over the device's (arg_groups/hicache_hook.py), unless it is sized."""
    if not flags.is_on("enable-hierarchical-cache") or flags.real("hicache-size"):
        return 0.0
    ratio = flags.real("hicache-ratio")
    return _HICACHE_RATIO if ratio is None else max(0.0, ratio)


def _kept_states(flags: Flags, *, data: int) -> int | None:
    """Return the sequences of a rank whose states a launch keeps; None where it does not state."""
    states = flags.number("max-mamba-cache-size")
    if states is None:
        return None
    slots = 1 if flags.is_on("disable-radix-cache") else STATE_SLOTS
    return max(states // (slots * data), 1)


def _state_ratio(flags: Flags, around: Surroundings) -> float | None:
    """Return states' memory over that of pages; None where the number of states is known.

    SGLang's `_handle_max_mamba_cache` (srt/model_executor, the configurator of the KV cache).

    Raises:
        SpecError: it is no positive ratio.
    """
    is_bounded = flags.is_on("disable-radix-cache") and "max-running-requests" in flags.values
    if around.model.linear is None or "max-mamba-cache-size" in flags.values or is_bounded:
        return None
    ratio = flags.real("mamba-full-memory-ratio")
    if ratio is not None and not 0.0 < ratio <= _MOST_STATE_RATIO:
        raise SpecError(
            f"{flags.source}: --mamba-full-memory-ratio {ratio:g} is not above 0 and up to"
            f" {_MOST_STATE_RATIO}; the engine's own is {_STATE_RATIO:g}"
        )
    return _STATE_RATIO if ratio is None else ratio


def _state_notes(flags: Flags, *, kept: int | None) -> Iterator[str]:
    if kept is None:
        yield (
            "no --max-mamba-cache-size: --mamba-full-memory-ratio divides the memory between states"
            " and pages"
        )
    if flags.is_on("disable-radix-cache"):
        yield f"--disable-radix-cache: priced with {STATE_SLOTS} states of a request, it keeps 1"


def _data(flags: Flags, *, devices: int) -> tuple[int, int]:
    """Return ranks of data-parallel attention, and instances behind the command."""
    newer, older = flags.number("attn-dp-size"), flags.number("dp-size")
    is_attention = flags.is_on("enable-dp-attention")
    if newer is not None and older is not None and is_attention and newer != older:
        raise SpecError(
            f"{flags.source}: --attn-dp-size {newer} and --dp-size {older} --enable-dp-attention"
            f" are one setting; keep --attn-dp-size {newer}"
        )
    data = newer or (older if is_attention else None) or 1
    copies = (older or 1) if newer is None and not is_attention else 1
    if devices % data:
        name = "attn-dp-size" if newer is not None else "dp-size"
        raise SpecError(
            f"{flags.source}: --{name} {data} does not divide --tp-size {devices}; the nearest"
            f" that does is {nearest_divisor(devices, data)}"
        )
    return data, copies


def _experts(flags: Flags, *, devices: int, data: int, around: Surroundings) -> InstanceDegrees:
    expert_ranks = flags.number("ep-size") or 1
    if around.model.moe is None:
        if expert_ranks > 1:
            raise SpecError(
                f"{flags.source}: --ep-size {expert_ranks} of {around.model.name}, a model without"
                " experts; the nearest is 1"
            )
        return InstanceDegrees(attention_tensor=devices // data, attention_data=data)
    if _backend(flags) == "deepep":
        expert_ranks = devices
    if devices % expert_ranks:
        raise SpecError(
            f"{flags.source}: --ep-size {expert_ranks} does not divide --tp-size {devices}; the "
            "nearest"
            f" that does is {nearest_divisor(devices, expert_ranks)}"
        )
    return InstanceDegrees(
        attention_tensor=devices // data,
        attention_data=data,
        expert=expert_ranks,
        moe_tensor=devices // expert_ranks,
    )


def _captured(flags: Flags) -> int | None:
    """Return the sequences of the largest graph; 0 without graphs, None where nothing is said."""
    if flags.is_on("disable-cuda-graph"):
        return 0
    stated = map(parse_whole, flags.words("cuda-graph-bs-decode"))
    sizes = [size for size in stated if size is not None]
    return max(sizes) if sizes else flags.number("cuda-graph-max-bs-decode")


def _usual_chunk(around: Surroundings) -> int:
    return next(tokens for below, tokens, _ in _BY_MEMORY if around.memory_bytes < below)


def _running(flags: Flags, *, data: int) -> int | None:
    total = flags.number("max-running-requests")
    if total is not None and total < data:
        raise SpecError(
            f"{flags.source}: --max-running-requests {total} leaves none for some of {data}"
            f" data-parallel ranks; the nearest is {data}"
        )
    return None if total is None else total // data


def _prompts(flags: Flags, *, data: int) -> tuple[int | None, bool]:
    """Return the tokens of a rank's step with prompts, and whether a prompt may take several."""
    chunk = flags.number("chunked-prefill-size", least=-1)
    max_tokens = flags.number("max-prefill-tokens")
    if chunk is None or chunk < 1:
        return max_tokens, chunk is None
    if chunk < data:
        raise SpecError(
            f"{flags.source}: --chunked-prefill-size {chunk} leaves none for some of {data}"
            f" data-parallel ranks; the nearest is {data}"
        )
    return min(chunk // data, max_tokens or chunk), True


def _drafts(flags: Flags) -> int:
    """Return the draft length; 0 without drafting, or with one that is not modelled.

    Raises:
        SpecError: flags of drafting without an algorithm.
    """
    if flags.word("speculative-algorithm") is None:
        given = next((name for name in _DRAFTING if name in flags.values), None)
        if given is not None:
            raise SpecError(
                f"{flags.source}: --{given} without --speculative-algorithm; add"
                " --speculative-algorithm NEXTN, or leave it out"
            )
        return 0
    if flags.word("speculative-algorithm") not in _ALGORITHMS:
        return 0
    return flags.number("speculative-num-steps") or USUAL_DRAFTS


def _draft_method(flags: Flags, around: Surroundings) -> DraftMethod:
    """Return the draft method: `EAGLE` of a model with MTP heads means those heads."""
    algorithm = flags.word("speculative-algorithm") or ""
    is_own = algorithm == "NEXTN" or (algorithm == "EAGLE" and around.model.mtp_num_layers > 0)
    return DraftMethod.MTP if is_own else DraftMethod.EAGLE


def _backend(flags: Flags) -> str:
    """Return the all-to-all backend; older releases had a switch for DeepEP."""
    usual = "deepep" if flags.is_on("enable-deepep-moe") else "none"
    return flags.word("moe-a2a-backend") or usual


def _all_to_all(flags: Flags, degrees: InstanceDegrees) -> str:
    backend = _backend(flags)
    if backend == "deepep":
        mode = flags.choice("deepep-mode", ("auto", "normal", "low_latency"), "auto")
        return "deepep_normal" if mode == "normal" else "deepep_low_latency"
    return "allgather" if degrees.attention_data > 1 else "none"


def _notes(
    flags: Flags, degrees: InstanceDegrees, *, running: int | None, copies: int
) -> list[str]:
    notes = []
    backend = _backend(flags)
    if running is None:
        notes.append(f"no --max-running-requests: {MOST_RUNNING} sequences a rank count")
    algorithm = flags.word("speculative-algorithm")
    if algorithm is not None and algorithm not in _ALGORITHMS:
        notes.append(f"--speculative-algorithm {algorithm[:40]} has no price; {_ALGORITHMS} have")
    if (flags.number("speculative-eagle-topk") or 1) > 1:
        notes.append("trees of drafts are priced as one chain of --speculative-num-steps")
    if backend == "deepep" and flags.number("ep-size") not in (None, degrees.expert):
        notes.append(f"deepep spreads experts over all {degrees.expert} ranks, not --ep-size")
    if backend not in ("none", "deepep"):
        notes.append(f"--moe-a2a-backend {backend[:40]} is priced as an all-to-all like DeepEP's")
    if backend != "deepep" and "deepep-mode" in flags.values:
        notes.append("--deepep-mode takes effect only with --moe-a2a-backend deepep")
    notes += _copied(flags)
    if flags.is_on("enable-pdmux"):
        notes.append("--enable-pdmux: priced without intra-GPU prefill/decode multiplexing")
    graphs = flags.number("cuda-graph-max-bs-decode")
    if graphs is not None and running is not None and graphs < running:
        notes.append(
            f"decode steps of more than {graphs} sequences wait for their kernels' launches"
        )
    if copies > 1:
        notes.append(
            f"--dp-size {copies} without --enable-dp-attention is {copies} separate instances"
        )
    return notes


def _copied(flags: Flags) -> list[str]:
    """Return a note on redundant experts that are placed without known loads."""
    placed = flags.is_on("enable-eplb") or "init-expert-location" in flags.values
    if not flags.number("ep-num-redundant-experts", least=0) or placed:
        return []
    return [
        "--ep-num-redundant-experts without --enable-eplb or --init-expert-location copies the"
        " first experts, whatever their loads, and is priced as copies that level them; add"
        " --enable-eplb"
    ]


_HICACHE_RATIO: Final = 2.0
_STATE_RATIO: Final = 0.9
"""The default of `--mamba-full-memory-ratio` (SGLang's srt/server_args.py)."""
_MOST_STATE_RATIO: Final = 1000
LAUNCH_FLAGS: Final = {
    "memory_ratio": "--mem-fraction-static {:g}",
    "kv_cache_dtype": "--kv-cache-dtype {}_e4m3",
    "max_model_len": "--context-length {}",
}
"""Flags of a launch for settings that are no knob of an instance, by field of ServingLaunch."""


def knob_flags(
    setting: InstanceKnobs, *, role: Role, draft_method: DraftMethod, num_experts: int
) -> Iterator[tuple[str, str]]:
    """Yield the flags that a setting has, as a launch states them."""
    degrees = setting.degrees
    yield "--tp-size", str(degrees.devices // degrees.pipeline)
    if degrees.pipeline > 1:
        yield "--pp-size", str(degrees.pipeline)
    if degrees.context > 1:
        yield "--dcp-size", str(degrees.context)
    if role is not Role.DECODE:
        yield "--chunked-prefill-size", str(setting.step_tokens * degrees.attention_data)
    if setting.a2a_backend.startswith("deepep"):
        mode = "normal" if setting.a2a_backend == "deepep_normal" else "auto"
        yield "--moe-a2a-backend", "deepep"
        yield "--deepep-mode", mode
    if setting.two_batch_overlap:
        yield "--enable-two-batch-overlap", ""
    if setting.draft_tokens:
        is_own = draft_method is DraftMethod.MTP
        yield "--speculative-algorithm", "NEXTN" if is_own else "EAGLE"
        yield "--speculative-num-steps", str(setting.draft_tokens)
        yield "--speculative-eagle-topk", "1"
        yield "--speculative-num-draft-tokens", str(setting.draft_tokens + 1)
    if degrees.attention_data > 1:
        yield "--attn-dp-size", str(degrees.attention_data)
    if degrees.expert > 1:
        yield "--ep-size", str(degrees.expert)
    if setting.redundant_experts:
        yield "--ep-num-redundant-experts", str(setting.redundant_experts)
        yield "--enable-eplb", ""
    yield "--max-running-requests", str(min(setting.running, MOST_RUNNING) * degrees.attention_data)


def own_memory_ratio(
    iteration: Iteration,
    setting: InstanceKnobs,
    *,
    role: Role,
    memory_bytes: float,
    captures_prompts: bool = True,
) -> float:
    """Return the share of memory that the engine gives itself where a launch states none."""
    degrees = iteration.degrees
    sequences = setting.running * degrees.attention_data
    usual = usual_captured(memory_bytes, devices=degrees.devices)
    captured = usual if setting.graph_sequences is None else setting.graph_sequences
    kinds = {group.attention.kind for group in iteration.decoder.layers}
    return automatic_ratio(
        degrees,
        memory_bytes=memory_bytes,
        active_tokens=sequences * iteration.checked_tokens
        if role is Role.DECODE
        else setting.step_tokens * degrees.attention_data,
        captured=0 if role is Role.PREFILL else min(captured, sequences),
        has_prompts=captures_prompts and role is not Role.DECODE,
        # DeepSeek-V4 counts as having many heads (configs/model_config.py, `attention_arch`).
        has_latent_cache=bool(kinds & LATENT_KINDS),
        has_deepep=setting.a2a_backend.startswith("deepep"),
    )


def usual_captured(memory_bytes: float, *, devices: int) -> int:
    """Return the sequences of the largest decode graph where a launch states none."""
    sizes = next(sizes for below, _, sizes in _BY_MEMORY if memory_bytes < below)
    return sizes[devices >= MANY_DEVICES]


def automatic_ratio(
    degrees: InstanceDegrees,
    *,
    memory_bytes: float,
    active_tokens: int,
    captured: int,
    has_prompts: bool,
    has_latent_cache: bool,
    has_deepep: bool,
) -> float:
    """Return the share of what is free; not above 0 where the engine fails.

    Model:   reserve = max(10 GiB, 512 MiB + 1.5 MiB T + 1 GiB N / 8 + graphs) + 2 GiB with DeepEP
             share = 1 - reserve / memory; T active tokens, 2,048 at least, N devices; the floor
             holds for devices of more than 60 GiB; graphs: 2 MiB of each captured sequence, 3 MiB
             of it and each data rank (4.5 beyond 300), and 8 MiB of each captured prompt length or
             1.5 GiB with compressed keys
    Source:  0.5.23, arg_groups/memory_hook.py. It is a share, not what steps take: data ranks with
             long chunks leave none, and such launches state one.

    Args:
        degrees: of the instance.
        memory_bytes: of one device.
        active_tokens: of a chunk over all data ranks, or of a decode instance's sequences.
        captured: sequences of the largest decode graph, 0 without any.
        has_prompts: prompts are read, so that their lengths are captured too.
        has_latent_cache: keys are compressed.
        has_deepep: experts are reached by DeepEP.
    """
    reserve = 512.0 + 1.5 * max(active_tokens, LEAST_ACTIVE) + 1024.0 * degrees.devices / 8.0
    reserve += 2.0 * captured
    if degrees.attention_data > 1:
        reserve += (4.5 if captured > MANY_CAPTURED else 3.0) * captured * degrees.attention_data
    if has_prompts:
        reserve += 1536.0 if has_latent_cache else 8.0 * PROMPT_GRAPHS
    if memory_bytes > LARGE_BYTES:
        reserve = max(reserve, LARGE_RESERVE / MIB)
    if has_deepep and captured:
        reserve += 2048.0
    return 1.0 - reserve * MIB / memory_bytes
