"""vLLM's server of one instance: `vllm serve`.

Experts are whole on TP x DP ranks under --enable-expert-parallel, else sliced over them. Under
low-latency DeepEP the batch's token budget is the size of the dispatch buffers, so a decode
instance gets its batch, drafts included. Decode graphs are captured at 1, 2, 4, multiples of 8
below 256 and of 16 from there on, and rounded up to whole requests where drafts are checked, so the
largest is asked for on that grid. Facts and their source: tuner/spec/serving/manifests/vllm.py.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Final

from tuner.emit.placement.vllm import STEP_INTERVAL
from tuner.emit.serving.afd import SERVERS as CELL_SERVERS
from tuner.emit.serving.afd import cell_address, cell_words, has_cells
from tuner.emit.serving.command import (
    BOOTSTRAP,
    RENDEZVOUS,
    SIDE_CHANNEL,
    SIDE_CHANNEL_OFFSET,
    ServerCommand,
)
from tuner.emit.serving.placement import PLACEMENT_FILE, ServedPlacement
from tuner.emit.serving.shape import GroupShape, drafted, portable, release_of, transfer
from tuner.serve_plan import Handover, Instances, Role, VerifiedServing
from tuner.spec.serving.manifests.manifest import ServingCapabilities
from tuner.spec.serving.manifests.steps import dispatch_tokens, step_tokens

_PLUGIN: Final = PLACEMENT_FILE["vllm"]

_KV_PORT: Final = "KV_PORT"
"""Variable of the first port of the side channel."""

_LEAST_HALVED: Final = 32
"""Tokens of a decode step above which vLLM overlaps halves by default."""

_ALL2ALL: Final[Mapping[str, str]] = {
    "none": "allgather_reducescatter",
    "allgather": "allgather_reducescatter",
    "deepep_normal": "deepep_high_throughput",
    "deepep_low_latency": "deepep_low_latency",
}


def server(
    verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
) -> ServerCommand:
    """Return the command of one machine of one instance."""
    group, goal = shape.group, verified.plan.goal
    manifest = release_of(verified, group)
    quantization = manifest.quantization[goal.quantization]
    kv_cache_dtype = manifest.kv_cache_dtype[goal.kv_cache_dtype]
    is_placed = placement is not None and placement.suits(group)
    is_cell = group.role in CELL_SERVERS
    handover = None if group.role is Role.EXPERT else transfer(verified)
    words = (
        'vllm serve "$MODEL"',
        '--host 0.0.0.0 --port "$PORT"',
        *_degrees(group, manifest=manifest),
        *(cell_words(verified, shape) if is_cell else ()),
        *((f"--quantization {quantization}",) if quantization else ()),
        *((f"--kv-cache-dtype {kv_cache_dtype}",) if kv_cache_dtype else ()),
        *((f"--max-model-len {goal.max_model_len}",) if goal.max_model_len else ()),
        *((f"--block-size {group.page_size}",) if group.page_size else ()),
        *((f"--gpu-memory-utilization {group.memory_ratio:g}",) if group.memory_ratio else ()),
        *_batches(group, manifest=manifest),
        *_drafting(verified, group, manifest=manifest),
        *(() if handover is None else _transfer(verified, group, handover, manifest=manifest)),
        *_copies(group, placement if is_placed else None),
        *(('"${SPREAD[@]}"',) if shape.nodes > 1 else ()),
        '"$@"',
    )
    return ServerCommand(
        words=words,
        environment={
            **({"VLLM_USE_V2_MODEL_RUNNER": "0"} if has_cells(verified) else {}),
            **({} if handover is None else _environment(group, handover)),
        },
        before=_kv_port(handover)
        + _spread(shape)
        + (cell_address(verified, shape) if is_cell else "")
        + (_PLUGIN_ON_PATH if is_placed else ""),
    )


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
# vLLM finds the plugin by its entry point, as if it were installed.
PLUGIN="$(mktemp -d)"
mkdir -- "$PLUGIN/moetune_placement-1.dist-info"
cp -- "$FILES/{_PLUGIN}" "$PLUGIN"
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
    if group.ep > 1 or group.role in CELL_SERVERS:
        yield "--enable-expert-parallel"
        if group.attention_dp > 1 and manifest.exchange_option:
            yield f"--all2all-backend {_ALL2ALL[group.a2a_backend]}"
    if group.two_batch_overlap:
        yield "--enable-dbo"
    if group.two_batch_overlap and group.role is not Role.PREFILL:
        # A full batch is halved however small; two tokens are the least that has halves.
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
    """Return the captured size that holds a decode step of the whole batch."""
    if group.a2a_backend == "deepep_low_latency" and group.role is Role.DECODE:
        return step_tokens(group)  # The token budget, which is always captured.
    each = group.draft_tokens + 1
    whole = -(-_captured(step_tokens(group)) // each) * each
    return _captured(whole)


def _captured(tokens: int) -> int:
    if tokens <= 4:
        return (1, 2, 4, 4)[tokens - 1]
    grain = 8 if tokens <= 248 else 16
    return -(-tokens // grain) * grain


def _drafting(
    verified: VerifiedServing, group: Instances, *, manifest: ServingCapabilities
) -> Iterator[str]:
    speculative, tokens = verified.plan.goal.speculative, drafted(verified, group)
    if speculative is None or not tokens:
        return
    config = {"method": manifest.drafting[speculative.method], "num_speculative_tokens": tokens}
    yield f"--speculative-config {shlex.quote(json.dumps(config))}"
    if speculative.method == "eagle":
        yield '--spec-model "$DRAFT_MODEL"'


def _transfer(
    verified: VerifiedServing,
    group: Instances,
    handover: Handover,
    *,
    manifest: ServingCapabilities,
) -> Iterator[str]:
    config: dict[str, object] = {
        "kv_connector": manifest.connectors[handover.connector],
        "kv_role": "kv_producer" if group.role is Role.PREFILL else "kv_consumer",
    }
    if handover.path == "host":
        config["kv_buffer_device"] = "cpu"
    if handover.connector == "ascend":
        config["kv_port"] = _KV_PORT
        config["kv_connector_extra_config"] = _ascend_degrees(verified)
    # The port is the shell's to fill in, between the quotes of the rest.
    quoted = shlex.quote(json.dumps(config)).replace(_KV_PORT, f"'\"${_KV_PORT}\"'")
    yield f"--kv-transfer-config {quoted}"
    backend = portable(verified, handover)
    if backend is not None:
        yield f"--attention-backend {backend}"


def _kv_port(handover: Handover | None) -> str:
    if handover is None or handover.connector != "ascend":
        return ""
    # Written so that estimate's reader of shell text can compute it.
    return f'{_KV_PORT}="$(($PORT+{SIDE_CHANNEL_OFFSET}))"\n'


def _ascend_degrees(verified: VerifiedServing) -> dict[str, dict[str, int]]:
    """Return the degrees of both sides, which each side must know."""
    found = {}
    for role in (Role.PREFILL, Role.DECODE):
        group = next(each for each in verified.decision.instances if each.role is role)
        found[role.value] = {"dp_size": group.attention_dp, "tp_size": group.attention_tp}
        if group.pp > 1:
            found[role.value]["pp_size"] = group.pp
    return found


def _environment(group: Instances, handover: Handover) -> Mapping[str, str]:
    if handover.connector == "nixl":
        return {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": '"$HOST_IP"',
            "VLLM_NIXL_SIDE_CHANNEL_PORT": SIDE_CHANNEL,
        }
    if handover.connector == "mooncake" and group.role is Role.PREFILL:
        return {"VLLM_MOONCAKE_BOOTSTRAP_PORT": BOOTSTRAP}
    return {}


def _copies(group: Instances, placement: ServedPlacement | None) -> Iterator[str]:
    """Yield how many copies of experts there are, and who places them."""
    config = {"num_redundant_experts": group.redundant_experts}
    if placement is not None:
        config = {
            "num_redundant_experts": placement.verified.decision.redundant_experts,
            "step_interval": STEP_INTERVAL,
            # Loads are recorded and not used.
            "window_size": 1,
        }
    elif not group.redundant_experts:
        return
    yield "--enable-eplb"
    yield f"--eplb-config {shlex.quote(json.dumps(config))}"
