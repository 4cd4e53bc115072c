"""TensorRT-LLM's server of one instance: `trtllm-serve` with a file of options.

Multi-node instances are MPI jobs with one task per device, which `trtllm-llmapi-launch` turns into
a server. Facts and their source: tuner/engines/trtllm/capabilities.py.
"""

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

import yaml

from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.catalog.serve_rules.steps import dispatch_tokens, step_tokens
from tuner.config.serve import Instances, Role
from tuner.engines.files import EmittedFile, comment
from tuner.engines.serving.command import ServerCommand
from tuner.engines.serving.dynamo_worker import DynamoWorker
from tuner.engines.serving.placement import ServedPlacement
from tuner.engines.serving.shape import GroupShape, draft_tokens_for, group_release, transfer
from tuner.engines.serving.statement import group_notes, statement
from tuner.engines.trtllm.capabilities import TRAITS
from tuner.engines.trtllm.placement import SERVED_FILE
from tuner.plans.serve import VerifiedServing

_BY_MPI: Final = '$([[ "$NNODES" == 1 ]] || echo trtllm-llmapi-launch)'

_METHOD: Final[Mapping[str, str]] = {
    "allgather": "ALLGATHER",
    "deepep_normal": "DEEPEP",
    "deepep_low_latency": "DEEPEPLOWLATENCY",
}


def server(
    verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
) -> ServerCommand:
    """Return the command of an instance, or of one of its tasks where it spans machines."""
    is_placed = placement is not None and placement.suits(shape.group)
    return ServerCommand(
        words=(
            *((_BY_MPI,) if shape.nodes > 1 else ()),
            'trtllm-serve serve "$MODEL"',
            '--host 0.0.0.0 --port "$PORT"',
            "--backend pytorch",
            f'--config "$FILES/{options_name(shape)}"',
            '"$@"',
        ),
        environment=_environment(shape.group, manifest=group_release(verified, shape.group)),
        # The engine opens the balancer's file relative to its current folder.
        before='cd -- "$FILES"\n' if is_placed else "",
    )


def options_name(shape: GroupShape) -> str:
    """Return the name of a group's options file."""
    return f"{shape.name}.yaml"


DYNAMO: Final = DynamoWorker(
    image="tensorrtllm", options_name=options_name, event_options=("--publish-kv-events",)
)


def command_files(
    verified: VerifiedServing,
    shapes: Iterable[GroupShape],
    placement: ServedPlacement | None,
) -> tuple[EmittedFile, ...]:
    """Return the options of every group, which its command reads."""
    return tuple(options_file(verified, shape, placement) for shape in shapes)


def options_file(
    verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
) -> EmittedFile:
    """Return the options of one group."""
    text = comment((*statement(verified), *group_notes(verified, shape))) + yaml.safe_dump(
        options(verified, shape, placement), sort_keys=False
    )
    return EmittedFile(path=PurePosixPath(options_name(shape)), text=text)


def options(
    verified: VerifiedServing, shape: GroupShape, placement: ServedPlacement | None
) -> dict[str, Any]:
    """Return the options of one group in the form of the engine's file."""
    group, goal = shape.group, verified.plan.goal
    manifest = group_release(verified, group)
    kv_transfer = transfer(verified)
    config: dict[str, Any] = {
        "tensor_parallel_size": group.attention_tp * group.attention_dp,
        "pipeline_parallel_size": group.pp,
        "moe_tensor_parallel_size": group.moe_tp,
        "moe_expert_parallel_size": group.ep,
        "enable_attention_dp": group.attention_dp > 1,
        **({"attention_dp_config": _ranks(verified, group)} if group.attention_dp > 1 else {}),
        "gpus_per_node": shape.devices_per_node,
        "max_batch_size": group.max_batch,
        "max_num_tokens": max(group.max_batched_tokens, step_tokens(group)),
    }
    if goal.max_model_len is not None:
        config["max_seq_len"] = goal.max_model_len
    config["enable_chunked_prefill"] = group.chunked_prefill
    config["disable_overlap_scheduler"] = group.role is Role.PREFILL
    pages = {} if group.page_size is None else {"tokens_per_block": group.page_size}
    dtype = goal.kv_cache_dtype
    word = TRAITS.cache_word(verified.plan.model, dtype=dtype, word=manifest.kv_cache_dtype[dtype])
    config["kv_cache_config"] = {"dtype": word, **pages}
    if group.memory_ratio is not None:
        config["kv_cache_config"]["free_gpu_memory_fraction"] = group.memory_ratio
    tokens = draft_tokens_for(verified, group)
    if goal.speculative is not None and tokens:
        config["speculative_config"] = {
            "decoding_type": manifest.drafting[goal.speculative.method],
            "max_draft_len": tokens,
        }
    if group.role is Role.PREFILL or group.a2a_backend == "deepep_normal":
        config["cuda_graph_config"] = None
    else:
        config["cuda_graph_config"] = {"enable_padding": True, "max_batch_size": group.max_batch}
    if kv_transfer is not None:
        config["cache_transceiver_config"] = {"backend": manifest.connectors[kv_transfer.connector]}
        if verified.plan.model.linear is not None:
            # The C++ one does not move states over NIXL.
            config["cache_transceiver_config"]["transceiver_runtime"] = "PYTHON"
    if placement is not None and placement.suits(group):
        config["moe_config"] = {"load_balancer": f"./{SERVED_FILE}"}
    elif group.redundant_experts and verified.plan.model.moe is not None:
        slots = verified.plan.model.moe.num_experts + group.redundant_experts
        # Rebalanced by recorded loads, one layer per step.
        config["moe_config"] = {"load_balancer": {"num_slots": slots, "layer_updates_per_iter": 1}}
    return config


def _ranks(verified: VerifiedServing, group: Instances) -> dict[str, bool]:
    """Return how requests are spread over ranks as they are planned; both are off by default."""
    routing = {"enable_balance": True}
    if group.role is not Role.DECODE and verified.predicted.prefix_hits is not None:
        routing["enable_kv_cache_aware_routing"] = True
    return routing


def _environment(group: Instances, *, manifest: ServingCapabilities) -> Mapping[str, str]:
    if group.a2a_backend == "none":
        return {}
    variables = {"TRTLLM_FORCE_COMM_METHOD": _METHOD[group.a2a_backend]}
    if group.a2a_backend == "allgather":
        return variables
    variables["TRTLLM_CAN_USE_DEEP_EP"] = "1"
    if group.a2a_backend == "deepep_low_latency":
        variables["TRTLLM_DEEP_EP_TOKEN_LIMIT"] = str(dispatch_tokens(manifest, group))
    return variables
