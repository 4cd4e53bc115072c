"""vLLM's server of one instance: `vllm serve`.

TP x DP ranks form the expert-parallel group under --enable-expert-parallel, otherwise each expert
is split over them. Under low-latency DeepEP the token budget is the size of the dispatch buffers,
so a decode instance gets its batch, drafts included. Decode graphs are captured at 1, 2, 4,
multiples of 8 below 256 and of 16 from there on, and rounded up to whole requests with speculative
decoding, so the largest size is set on that grid. Facts and their source:
tuner/engines/vllm/capabilities.py.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Final

from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.catalog.serve_rules.steps import dispatch_tokens, step_tokens
from tuner.config.serve import Instances, PlannedKvTransfer, Role
from tuner.costs.serve.kv_transfer import cache_shape
from tuner.devices.datasheet import Vendor
from tuner.engines.files import EmittedFile
from tuner.engines.serving.command import (
    BOOTSTRAP,
    RENDEZVOUS,
    SIDE_CHANNEL,
    SIDE_CHANNEL_OFFSET,
    ServerCommand,
)
from tuner.engines.serving.dynamo_worker import DynamoWorker, cache_events
from tuner.engines.serving.placement import ServedPlacement
from tuner.engines.serving.router import follows_text
from tuner.engines.serving.shape import (
    GroupShape,
    draft_tokens_for,
    group_release,
    link_environment,
    portable,
    transfer,
)
from tuner.engines.vllm.capabilities import TRAITS
from tuner.engines.vllm.placement import SERVED_FILE, STEP_INTERVAL
from tuner.engines.vllm_afd.write import SERVERS as AFD_ROLES
from tuner.engines.vllm_afd.write import afd_address, afd_flags, has_afd_units
from tuner.plans.serve import VerifiedServing

BF16_BYTES: Final = 2
SCALE_OUT: Final = "--enable-scale-out"
"""Serves `/v1/completions/render`, else answered with 403 (0.32.0 and 0.33.0,
entrypoints/scale_out/factories.py): vllm-router 0.1.17 asks it for the tokens of a prompt of text,
and follows no prefix without them."""

_KV_PORT: Final = "KV_PORT"
"""Variable of the first port of the side channel."""

_LEAST_HALVED: Final = 32
"""Tokens of a decode step from which vLLM uses dual-batch overlap by default."""

_STATE_LAYOUT: Final = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""Layout in which connectors move the convolution states of linear attention."""

_ALL2ALL: Final[Mapping[str, str]] = {
    "none": "allgather_reducescatter",
    "allgather": "allgather_reducescatter",
    "deepep_normal": "deepep_high_throughput",
    "deepep_low_latency": "deepep_low_latency",
}

DYNAMO: Final = DynamoWorker(
    image="vllm",
    event_options=cache_events(enable_kv_cache_events=True),
    placement_package=(
        EmittedFile(
            path=PurePosixPath("METADATA"),
            text="Metadata-Version: 2.1\nName: moetune-placement\nVersion: 1\n",
        ),
        EmittedFile(
            path=PurePosixPath("entry_points.txt"),
            text="[vllm.general_plugins]\nmoetune_placement = moetune_placement:register\n",
        ),
    ),
)


def server(
    verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
) -> ServerCommand:
    """Return the command of one machine of one instance."""
    group, goal = shape.group, verified.plan.goal
    manifest = group_release(verified, group)
    quantization = manifest.quantization[goal.quantization]
    dtype = goal.kv_cache_dtype
    kv_cache_dtype = TRAITS.cache_word(
        verified.plan.model, dtype=dtype, word=manifest.kv_cache_dtype[dtype]
    )
    is_placed = placement is not None and placement.suits(group)
    is_afd, linear = group.role in AFD_ROLES, verified.plan.model.linear
    kv_transfer = None if group.role is Role.EXPERT else transfer(verified)
    words = (
        'vllm serve "$MODEL"',
        '--host 0.0.0.0 --port "$PORT"',
        *_degrees(group, manifest=manifest),
        *(afd_flags(verified, shape) if is_afd else ()),
        *((f"--quantization {quantization}",) if quantization else ()),
        *((f"--kv-cache-dtype {kv_cache_dtype}",) if kv_cache_dtype else ()),
        *((f"--max-model-len {goal.max_model_len}",) if goal.max_model_len else ()),
        *((f"--block-size {group.page_size}",) if group.page_size else ()),
        *((f"--gpu-memory-utilization {group.memory_ratio:g}",) if group.memory_ratio else ()),
        *_batches(group, manifest=manifest),
        *(() if group.chunked_prefill or linear is None else ("--no-enable-prefix-caching",)),
        *_drafting(verified, group, manifest=manifest),
        *(
            ()
            if kv_transfer is None
            else _transfer(verified, group, kv_transfer, manifest=manifest)
        ),
        *_copies(group, placement if is_placed else None),
        *((SCALE_OUT,) if follows_text(verified) else ()),
        *(('"${SPREAD[@]}"',) if shape.nodes > 1 else ()),
        '"$@"',
    )
    return ServerCommand(
        words=words,
        environment={
            **({"VLLM_USE_V2_MODEL_RUNNER": "0"} if has_afd_units(verified) else {}),
            **({} if kv_transfer is None else _environment(group, kv_transfer)),
            **link_environment(verified, group),
            **(_STATE_LAYOUT if kv_transfer is not None and linear is not None else {}),
            **(_cache_space(verified, group) if manifest.vendor is Vendor.CPU else {}),
        },
        before=_kv_port(kv_transfer)
        + _spread(shape)
        + (afd_address(verified, shape) if is_afd else "")
        + (_PLUGIN_ON_PATH if is_placed else ""),
    )


def _cache_space(verified: VerifiedServing, group: Instances) -> dict[str, str]:
    """The KV cache of one rank in whole GiB, which a processor's server is told."""
    token_bytes = BF16_BYTES * cache_shape(verified.plan.model).elements_per_token
    rank_bytes = group.kv_tokens * token_bytes / group.attention_tp
    return {"VLLM_CPU_KVCACHE_SPACE": str(max(int(rank_bytes // 2**30), 1))}


_SPREAD: Final = {
    # One data-parallel rank over several machines.
    False: f"""\
SPREAD=()
if (( NNODES > 1 )); then
  SPREAD=(--nnodes "$NNODES" --node-rank "$NODE_RANK")
  SPREAD+=(--master-addr "$MASTER_ADDR" --master-port {RENDEZVOUS})
  if (( NODE_RANK > 0 )); then SPREAD+=(--headless); fi
fi
""",
    # Several data-parallel ranks on each machine.
    True: f"""\
SPREAD=()
if (( NNODES > 1 )); then
  LOCAL=$((DATA_PARALLEL / NNODES))
  SPREAD=(--data-parallel-size-local "$LOCAL" --data-parallel-start-rank "$((NODE_RANK * LOCAL))")
  SPREAD+=(--data-parallel-address "$MASTER_ADDR" --data-parallel-rpc-port {RENDEZVOUS})
  if (( NODE_RANK > 0 )); then SPREAD+=(--headless); fi
fi
""",
}

_PLUGIN_ON_PATH: Final = f"""\
# vLLM finds the plugin by its entry point, as if installed.
PLUGIN="$(mktemp -d)"
mkdir -- "$PLUGIN/moetune_placement-1.dist-info"
cp -- "$FILES/{SERVED_FILE}" "$PLUGIN"
printf '%s\\n' 'Metadata-Version: 2.1' 'Name: moetune-placement' 'Version: 1' \\
  > "$PLUGIN/moetune_placement-1.dist-info/METADATA"
printf '%s\\n' '[vllm.general_plugins]' 'moetune_placement = moetune_placement:register' \\
  > "$PLUGIN/moetune_placement-1.dist-info/entry_points.txt"
export PYTHONPATH="$PLUGIN${{PYTHONPATH:+:$PYTHONPATH}}"
"""


def _spread(shape: GroupShape) -> str:
    if shape.nodes == 1:
        return ""
    data_parallel = shape.group.attention_dp
    known = f"DATA_PARALLEL={data_parallel}\n" if data_parallel > 1 else ""
    return known + _SPREAD[data_parallel > 1]


def _degrees(group: Instances, *, manifest: ServingCapabilities) -> Iterator[str]:
    yield f"--tensor-parallel-size {group.attention_tp}"
    if group.pp > 1:
        yield f"--pipeline-parallel-size {group.pp}"
    if group.attention_dp > 1:
        yield f"--data-parallel-size {group.attention_dp}"
    if group.ep > 1 or group.role in AFD_ROLES:
        yield "--enable-expert-parallel"
        if group.attention_dp > 1 and manifest.has_a2a_option:
            yield f"--all2all-backend {_ALL2ALL[group.a2a_backend]}"
    if group.two_batch_overlap:
        yield "--enable-dbo"
    if group.two_batch_overlap and group.role is not Role.PREFILL:
        # A full batch is always split; two tokens are the least that can be.
        yield f"--dbo-decode-token-threshold {max(2, min(_LEAST_HALVED, step_tokens(group)))}"


def _batches(group: Instances, *, manifest: ServingCapabilities) -> Iterator[str]:
    is_capped = group.role is Role.DECODE and group.a2a_backend == "deepep_low_latency"
    tokens = (
        dispatch_tokens(manifest, group)
        if is_capped
        else max(group.max_batched_tokens, step_tokens(group))
    )
    yield f"--max-num-seqs {group.max_batch}"
    yield f"--max-num-batched-tokens {tokens}"
    if group.role is not Role.DECODE and not group.chunked_prefill:
        yield manifest.whole_prompts_option
    if group.role is not Role.PREFILL:
        yield f"--max-cudagraph-capture-size {_graph_tokens(group)}"


def _graph_tokens(group: Instances) -> int:
    """Return the CUDA graph size that fits a decode step of the whole batch."""
    if group.a2a_backend == "deepep_low_latency" and group.role is Role.DECODE:
        return step_tokens(group)  # The token budget, which is always captured.
    sequence_tokens = group.draft_tokens + 1
    whole = -(-_capture_size(step_tokens(group)) // sequence_tokens) * sequence_tokens
    return _capture_size(whole)


def _capture_size(tokens: int) -> int:
    if tokens <= 4:
        return (1, 2, 4, 4)[tokens - 1]
    grain = 8 if tokens <= 248 else 16
    return -(-tokens // grain) * grain


def _drafting(
    verified: VerifiedServing, group: Instances, *, manifest: ServingCapabilities
) -> Iterator[str]:
    speculative, tokens = verified.plan.goal.speculative, draft_tokens_for(verified, group)
    if speculative is None or not tokens:
        return
    config = {"method": manifest.drafting[speculative.method], "num_speculative_tokens": tokens}
    yield f"--speculative-config {shlex.quote(json.dumps(config))}"
    if speculative.method == "eagle":
        yield '--spec-model "$DRAFT_MODEL"'


def _transfer(
    verified: VerifiedServing,
    group: Instances,
    kv_transfer: PlannedKvTransfer,
    *,
    manifest: ServingCapabilities,
) -> Iterator[str]:
    config: dict[str, object] = {
        "kv_connector": manifest.connectors[kv_transfer.connector],
        "kv_role": "kv_producer" if group.role is Role.PREFILL else "kv_consumer",
    }
    if kv_transfer.path == "host" or manifest.vendor is Vendor.CPU:
        config["kv_buffer_device"] = "cpu"
    if kv_transfer.connector == "ascend":
        config["kv_port"] = _KV_PORT
        config["kv_connector_extra_config"] = _ascend_degrees(verified)
    # The shell expands the port, so it is outside the quotes.
    quoted = shlex.quote(json.dumps(config)).replace(_KV_PORT, f"'\"${_KV_PORT}\"'")
    yield f"--kv-transfer-config {quoted}"
    backend = portable(verified, kv_transfer)
    if backend is not None:
        yield f"--attention-backend {backend}"


def _kv_port(kv_transfer: PlannedKvTransfer | None) -> str:
    if kv_transfer is None or kv_transfer.connector != "ascend":
        return ""
    # In a form that `moetune estimate` can evaluate.
    return f'{_KV_PORT}="$(($PORT+{SIDE_CHANNEL_OFFSET}))"\n'


def _ascend_degrees(verified: VerifiedServing) -> dict[str, dict[str, int]]:
    """Return the degrees of prefill and decode, which each side needs."""
    degrees = {}
    for role in (Role.PREFILL, Role.DECODE):
        group = next(
            candidate for candidate in verified.decision.instances if candidate.role is role
        )
        degrees[role.value] = {"dp_size": group.attention_dp, "tp_size": group.attention_tp}
        if group.pp > 1:
            degrees[role.value]["pp_size"] = group.pp
    return degrees


def _environment(group: Instances, kv_transfer: PlannedKvTransfer) -> Mapping[str, str]:
    if kv_transfer.connector == "nixl":
        return {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": '"$HOST_IP"',
            "VLLM_NIXL_SIDE_CHANNEL_PORT": SIDE_CHANNEL,
        }
    if kv_transfer.connector == "mooncake" and group.role is Role.PREFILL:
        return {"VLLM_MOONCAKE_BOOTSTRAP_PORT": BOOTSTRAP}
    return {}


def _copies(group: Instances, placement: ServedPlacement | None) -> Iterator[str]:
    """Yield the options of redundant experts and their placement."""
    config = {"num_redundant_experts": group.redundant_experts}
    if placement is not None:
        config = {
            "num_redundant_experts": placement.verified.decision.redundant_experts,
            "step_interval": STEP_INTERVAL,
            # Recorded loads are not used.
            "window_size": 1,
        }
    elif not group.redundant_experts:
        return
    yield "--enable-eplb"
    yield f"--eplb-config {shlex.quote(json.dumps(config))}"
