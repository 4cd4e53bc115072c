"""SGLang's server of one instance: `python -m sglang.launch_server`.

tp_size = attention_tp x attention_dp; sizes that the engine divides by the attention-DP size are
multiplied by it. A multiplexed device has one division, so that prefill has its share whenever
decode runs beside it. Facts and their source: tuner/engines/sglang/capabilities.py.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from tuner.catalog.serve_rules.manifest import DEEPEP, ServingCapabilities
from tuner.catalog.serve_rules.steps import dispatch_tokens
from tuner.config.serve import Instances, PlannedKvTransfer, Role
from tuner.engines.files import EmittedFile
from tuner.engines.serving.command import BOOTSTRAP, RENDEZVOUS, ServerCommand
from tuner.engines.serving.dynamo_worker import DynamoWorker, cache_events
from tuner.engines.serving.placement import ServedPlacement, served_mark
from tuner.engines.serving.shape import (
    GroupShape,
    draft_tokens_for,
    group_release,
    link_environment,
    transfer,
)
from tuner.engines.sglang.capabilities import STATE_SLOTS, TRAITS
from tuner.engines.sglang.multiplexing import shares_file, shares_name
from tuner.engines.sglang.placement import SERVED_FILE, planned_mark
from tuner.plans.serve import VerifiedServing

_MEMFABRIC: Final[Mapping[str, str]] = {
    "ASCEND_MF_STORE_URL": '"${ASCEND_MF_STORE_URL:?set it to tcp://HOST:PORT, a free port of the'
    ' first prefill instance, the same everywhere}"',
    "ASCEND_MF_TRANSFER_PROTOCOL": "device_rdma",
}
"""Variables for KV transfers on Atlas A2 servers (docs.sglang.io, Ascend NPUs, installation)."""


DYNAMO: Final = DynamoWorker(
    image="sglang",
    model_option="--model-path",
    names_role=False,
    event_options=cache_events(format="dynamo"),
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
    words = (
        "python -m sglang.launch_server",
        '--model-path "$MODEL"',
        '--host 0.0.0.0 --port "$PORT"',
        *_degrees(group),
        *((f"--quantization {quantization}",) if quantization else ()),
        *((f"--kv-cache-dtype {kv_cache_dtype}",) if kv_cache_dtype else ()),
        *((f"--context-length {goal.max_model_len}",) if goal.max_model_len else ()),
        *((f"--page-size {group.page_size}",) if group.page_size else ()),
        *((f"--mem-fraction-static {group.memory_ratio:g}",) if group.memory_ratio else ()),
        *_batches(group),
        *(() if verified.plan.model.linear is None else _states(group)),
        *_drafting(verified, group, manifest=manifest),
        *(_sharing(shape) if group.prefill_share_ratio is not None else ()),
        *_disaggregation(verified, group, manifest=manifest),
        *_placement(verified, shape, placement),
        *_metrics(verified, manifest),
        *(('"${SPREAD[@]}"',) if shape.nodes > 1 else ()),
        '"$@"',
    )
    return ServerCommand(
        words=words,
        environment={
            **_environment(group, transfer(verified), manifest=manifest),
            **link_environment(verified, group),
        },
        before=_SPREAD if shape.nodes > 1 else "",
    )


def _metrics(verified: VerifiedServing, manifest: ServingCapabilities) -> Iterator[str]:
    if verified.autoscaling is not None and manifest.load_metrics is not None:
        yield manifest.load_metrics.option


_SPREAD = f"""\
SPREAD=()
if (( NNODES > 1 )); then
  SPREAD=(--nnodes "$NNODES" --node-rank "$NODE_RANK" --dist-init-addr "$MASTER_ADDR":{RENDEZVOUS})
fi
"""


def _degrees(group: Instances) -> Iterator[str]:
    yield f"--tp-size {group.attention_tp * group.attention_dp}"
    if group.pp > 1:
        yield f"--pp-size {group.pp}"
    if group.attention_dp > 1:
        yield f"--attn-dp-size {group.attention_dp}"
    if group.ep > 1:
        yield f"--ep-size {group.ep}"
    if group.a2a_backend in DEEPEP:
        yield f"--moe-a2a-backend deepep --deepep-mode {_deepep_mode(group)}"
    if group.two_batch_overlap:
        yield "--enable-two-batch-overlap"


def _deepep_mode(group: Instances) -> str:
    if group.a2a_backend == "deepep_normal":
        return "normal"
    # Prompts of an aggregated instance go through the normal kernels.
    return "auto" if group.role is Role.AGGREGATED else "low_latency"


def _batches(group: Instances) -> Iterator[str]:
    yield f"--max-running-requests {group.max_batch * group.attention_dp}"
    if group.role is not Role.DECODE:
        chunk = group.max_batched_tokens * group.attention_dp if group.chunked_prefill else -1
        yield f"--chunked-prefill-size {chunk}"
        yield f"--max-prefill-tokens {group.max_batched_tokens}"
    if group.role is not Role.PREFILL and group.a2a_backend != "deepep_normal":
        yield f"--cuda-graph-max-bs-decode {group.max_batch}"


def _states(group: Instances) -> Iterator[str]:
    # So many as the running requests take; the rest of the memory is for pages.
    yield f"--max-mamba-cache-size {STATE_SLOTS * group.max_batch * group.attention_dp}"


def _drafting(
    verified: VerifiedServing, group: Instances, *, manifest: ServingCapabilities
) -> Iterator[str]:
    speculative, tokens = verified.plan.goal.speculative, draft_tokens_for(verified, group)
    if speculative is None or not tokens:
        return
    yield f"--speculative-algorithm {manifest.drafting[speculative.method]}"
    if speculative.method == "eagle":
        yield '--speculative-draft-model-path "$DRAFT_MODEL"'
    # One candidate per step: the draft chain and the token after it are verified.
    yield f"--speculative-num-steps {tokens} --speculative-eagle-topk 1"
    yield f"--speculative-num-draft-tokens {tokens + 1}"


def _sharing(shape: GroupShape) -> Iterator[str]:
    # Three groups: all for prefill, both at once, all for decode.
    yield f'--enable-pdmux --pdmux-config-path "$FILES/{shares_name(shape)}" --sm-group-num 3'
    yield "--disable-overlap-schedule"


def _environment(
    group: Instances, kv_transfer: PlannedKvTransfer | None, *, manifest: ServingCapabilities
) -> Mapping[str, str]:
    if kv_transfer is not None and kv_transfer.connector == "ascend":
        return _MEMFABRIC
    if group.a2a_backend != "deepep_low_latency":
        return {}
    cap = dispatch_tokens(manifest, group)
    return {"SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK": str(cap)}


def _disaggregation(
    verified: VerifiedServing, group: Instances, *, manifest: ServingCapabilities
) -> Iterator[str]:
    kv_transfer = transfer(verified)
    if kv_transfer is None or group.role is Role.AGGREGATED:
        return
    yield f"--disaggregation-mode {group.role.value}"
    yield f"--disaggregation-transfer-backend {manifest.connectors[kv_transfer.connector]}"
    if group.role is Role.PREFILL:
        yield f"--disaggregation-bootstrap-port {BOOTSTRAP}"


def _placement(
    verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
) -> Iterator[str]:
    if placement is None or not placement.suits(shape.group):
        if shape.group.redundant_experts:
            # EPLB places copies by the recorded loads; without it they would be of the first
            # experts.
            yield f"--ep-num-redundant-experts {shape.group.redundant_experts} --enable-eplb"
        return
    planned = placement.verified
    yield f'--init-expert-location "$FILES/{SERVED_FILE}"'
    yield f"--ep-num-redundant-experts {planned.decision.redundant_experts}"
    served_placement_for = served_mark(
        planned_mark(planned.plan), shape, engine=group_release(verified, shape.group)
    )
    yield f"--ep-dispatch-algorithm {served_placement_for.dispatch}"


def command_files(
    verified: VerifiedServing,
    shapes: Iterable[GroupShape],
    _placement: ServedPlacement | None,
) -> tuple[EmittedFile, ...]:
    """Return the files of groups that multiplex prefill and decode, which their commands read."""
    return tuple(
        shares_file(verified, shape)
        for shape in shapes
        if shape.group.prefill_share_ratio is not None
    )
