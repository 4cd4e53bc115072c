"""Emits arguments for Megatron-LM's programs: `megatron_args.txt`, and `run.sh` around it.

`pretrain_gpt.py` trains all models but hybrids (tuner/engines/megatron_lm/mixers.py).

The fields of tuner/engines/megatron_lm/core.py become flags, a few under another name; options that
are off are not written. Flags of the optimizer, its sharding and its overlaps are added. Flags were
checked against the parsers of core_v0.16.1, core_v0.18.0 and core_v0.19.0 of
github.com/NVIDIA/Megatron-LM. Expert tensor parallelism is always written, because the engine's
default is that of the dense layers.

Not covered: data, tokenizer, optimizer and learning rate, which are the user's; rope
scaling, partial rotary and routed scaling factors, which affect neither time nor memory.
"""

from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import PurePosixPath
from typing import Final

from tuner.catalog.manifest import PIPELINE_INSIDE_ORDER
from tuner.catalog.programs import DeviceKind
from tuner.config.train import TrainDecision
from tuner.engines.assumptions import assumptions
from tuner.engines.checkpoints import FOLDER_NOTE, CheckpointSchedule, checkpoint_schedule
from tuner.engines.files import EmittedFile, comment
from tuner.engines.launchers.shape import LaunchShape, launch_shape
from tuner.engines.launchers.time_limit import LIMIT_NOTE, exit_minutes
from tuner.engines.launchers.torchrun import ENVIRONMENT_NOTE, preamble
from tuner.engines.megatron_lm import in_process
from tuner.engines.megatron_lm.core import (
    GPT_OSS,
    NEMOTRON_H,
    Core,
    decision_fields,
    model_fields,
)
from tuner.engines.megatron_lm.environment import environment
from tuner.engines.megatron_lm.flags import SHARDING
from tuner.engines.megatron_lm.local_checkpoints import (
    LOCAL_NOTE,
    NOTES,
    has_local,
    local_settings,
)
from tuner.engines.megatron_lm.mixers import Value, is_hybrid
from tuner.engines.priced_settings import written
from tuner.engines.statement import brief_statement, statement
from tuner.plans.train import VerifiedPlan
from tuner.spec.features import ModelFeature, features
from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec

Argument = tuple[str, ...]
"""A flag and its values."""

_FLAGS: Final = {
    "num_moe_experts": "--num-experts",
    "layernorm_epsilon": "--norm-epsilon",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "fp8": "--fp8-format",
    "fp4": "--fp4-format",
}
"""Flags that differ from the field's name."""

_ELSEWHERE: Final = frozenset(
    {"add_bias_linear", "activation_func", "gated_linear_unit", "num_query_groups"}
)
"""Fields that have flags of another form."""

_DEFAULTS: Final[dict[str, Value]] = {"cuda_graph_impl": "none", "moe_layer_freq": 1}
"""Defaults of the parser."""

_LISTS_OF_LAYERS: Final = frozenset(
    {"moe_layer_freq", "window_attn_skip_freq", "linear_attention_freq"}
)
"""A zero or one per layer, which flags take as an expression."""

_HYBRID_PROGRAM: Final = {Core.V0_16: "pretrain_mamba.py", Core.V0_18: "pretrain_hybrid.py"}
_HYBRID_LAYERS: Final = {
    Core.V0_16: ("megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"),
    Core.V0_18: ("megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
}
"""Module and name of the layers that the program of hybrids builds."""

_PACKAGES: Final = {
    ModelFeature.MAMBA2: "Mamba-2 layers need the packages mamba-ssm and causal-conv1d.",
    ModelFeature.GATED_DELTA: "The gated delta rule needs the package flash-linear-attention.",
}
"""Notes on the packages that megatron/core/ssm/ imports, by feature."""

_NEEDS_CUDA: Final = (
    ("--moe-grouped-gemm",),
    ("--moe-permute-fusion",),
    ("--cross-entropy-fusion-impl", "te"),
)
"""Kernels of Transformer Engine."""

_ON_PROCESSORS: Final[tuple[Argument, ...]] = (
    ("--transformer-impl", "local"),
    ("--distributed-backend", "gloo"),
    ("--no-rope-fusion",),
    ("--no-gradient-accumulation-fusion",),
    ("--no-masked-softmax-fusion",),
    ("--no-bias-swiglu-fusion",),
    ("--no-persist-layer-norm",),
)
"""Layers and collectives that run on processors; each fusion is on unless it is named."""

_YOURS: Final = (
    "Not set here, because no plan depends on it: data, tokenizer, optimizer,",
    "learning rate, rope scaling, partial rotary, routed scaling factor. Add them after run.sh:",
    "  bash run.sh --data-path ... --tokenizer-type ... --train-iters ... --lr ...",
)


_BACKGROUND: Final = (
    "From core 0.17 on, --async-save needs the package nvidia-resiliency-ext (0.7.0 has run with",
    "core 0.19.1), or --async-strategy mcore beside it, which logs that it will be removed.",
)
"""`get_async_strategy` (megatron/core/dist_checkpointing/strategies/torch.py) raises without it;
the strategy is "nvrx" by default. 0.16 has its own writer only."""

_RETENTION: Final = (
    "Weights converted for Megatron-LM must not lie in CHECKPOINTS, where removing old checkpoints",
    "fails at a latest_checkpointed_iteration.txt that says release: name them by",
    "--pretrained-checkpoint.",
)
"""`save_checkpoint` of core_v0.16.1 to core_v0.19.0 reads the number of the last checkpoint there
once the next one is finished, in the background or not, in every format. It then removes the last
one unless `--save-retain-interval` divides its number, which `--save-interval` must divide."""


def emit(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the argument file and a script that starts Megatron-LM with it."""
    return _emit(verified, core=Core.V0_18)


def emit_0_16(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the same for core 0.16 and 0.17."""
    return _emit(verified, core=Core.V0_16)


def _emit(verified: VerifiedPlan, *, core: Core) -> tuple[EmittedFile, ...]:
    plan = verified.plan
    schedule = checkpoint_schedule(verified, retains=True)
    shape = launch_shape(plan, verified.decision)
    restarts_in_place = in_process.restarts_in_process(verified, shape)
    warnings = (
        *cautions(plan.model, verified.decision),
        *assumptions("megatron-lm", plan.model, plan.goal, verified.decision),
        *(_BACKGROUND if schedule is not None and schedule.is_asynchronous else ()),
    )
    said = (
        *statement(verified, schedule=schedule),
        f"The plan assumes a vocabulary of {plan.model.vocab_size}; the tokenizer decides.",
        *warnings,
        *(_RETENTION if schedule is not None else ()),
        *(NOTES if has_local(schedule) else ()),
        *(in_process.NOTES if restarts_in_place else ()),
        "",
        *_YOURS,
    )
    lines = (
        *arguments(
            plan.model, plan.goal, verified.decision, core=core, device_kind=shape.device_kind
        ),
        *_checkpoints(schedule, verified.decision),
        *in_process.arguments(verified, shape),
    )
    return (
        EmittedFile(
            path=PurePosixPath("megatron_args.txt"),
            text=comment((*brief_statement(verified), *warnings))
            + "".join(" ".join(line) + "\n" for line in lines),
        ),
        EmittedFile(
            path=PurePosixPath("run.sh"),
            text="#!/usr/bin/env bash\n"
            + comment(
                (
                    *said,
                    "",
                    *ENVIRONMENT_NOTE,
                    "  MEGATRON_LM              the folder of a Megatron-LM checkout; needed",
                    *FOLDER_NOTE,
                    *(() if schedule is None else LIMIT_NOTE),
                    *(LOCAL_NOTE if has_local(schedule) else ()),
                )
            )
            + preamble(shape)
            + environment(verified.decision, device_kind=shape.device_kind)
            + (in_process.ENVIRONMENT if restarts_in_place else "")
            + _start(schedule, shape, program=program(plan.model, core=core)),
            executable=True,
        ),
    )


def _start(schedule: CheckpointSchedule | None, shape: LaunchShape, *, program: str) -> str:
    """Return bash that starts the program, saving and resuming where folders are named."""
    if schedule is None:
        return _START.format(needs="", program=program, local="", last="")
    needs, local = exit_minutes(schedule.ending_s), ""
    if has_local(schedule):
        listed = "".join(
            f"  {_local_argument(*setting)}\n" for setting in local_settings(schedule, shape)
        )
        needs += _NEEDS_LOCAL.format(listed=listed)
        local = '  "${LOCAL[@]}" \\\n'
    return _START.format(needs=needs, program=program, local=local, last=_LAST)


def _local_argument(name: str, value: str | int | bool) -> str:
    """Write a setting of checkpoints on hosts as words of the shell."""
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f'{flag} "{value}"'


def _checkpoints(
    schedule: CheckpointSchedule | None, decision: TrainDecision
) -> Iterator[Argument]:
    """Yield when and how to save; without a folder to save to, Megatron-LM ignores it."""
    if schedule is None:
        return
    yield ("--save-interval", str(schedule.steps))
    if schedule.retain_steps is not None:
        yield ("--save-retain-interval", str(schedule.retain_steps))
    if is_reshardable(schedule, decision):
        yield ("--dist-ckpt-optim-fully-reshardable",)
    if schedule.is_asynchronous:
        yield ("--async-save",)
        # Without it Megatron-LM turns asynchronous saving off.
        yield ("--use-persistent-ckpt-worker",)


def is_reshardable(schedule: CheckpointSchedule, decision: TrainDecision) -> bool:
    """Return whether the optimizer must save in a form that another layout can restore.

    By default its `distrib_optim_sharding_type` is `dp_reshardable`, which `load_checkpoint`
    refuses with another TP or PP (core_v0.16.1 to core_v0.19.0).
    """
    return bool(schedule.other_layout) and decision.zero_stage == 1


def program(model: ModelSpec, *, core: Core = Core.V0_18) -> str:
    """Return the file of Megatron-LM that trains the model."""
    return _HYBRID_PROGRAM[core] if is_hybrid(model) else "pretrain_gpt.py"


def cautions(model: ModelSpec, decision: TrainDecision) -> tuple[str, ...]:
    """Return what the user must know before starting, a line each."""
    lines = [line for feature, line in _PACKAGES.items() if feature in features(model)]
    if model.attention.indexer is not None:
        lines.append(
            "Sparse attention is priced with its kernels: core 0.19 has them (add "
            "--dsa-kernel-backend tilelang or cudnn), 0.18 computes every score and keeps it. Its"
            " indexers are trained by their loss alone, which is priced and which you must add"
            " (dsa_indexer_loss_coeff; Megatron-Bridge trains GLM-5 with 0.001)."
        )
    if not model.ffn_is_gated and model.architecture != NEMOTRON_H:
        lines.append("The feed-forward activation is GELU unless you name another.")
    if decision.cuda_graph == "full_iteration" and model.num_moe_layers:
        lines.append(
            "One CUDA graph of the whole step pads experts: tokens beyond 1.5 times an even share "
            "of an expert rank are dropped."
        )
    return tuple(lines)


def arguments(
    model: ModelSpec,
    goal: TrainGoal,
    decision: TrainDecision,
    *,
    core: Core = Core.V0_18,
    device_kind: DeviceKind = "cuda",
) -> tuple[Argument, ...]:
    """Return every argument that the plan decides, one flag with its values per entry.

    Raises:
        ValueError: stages differ in what is one setting for Megatron-LM.
    """
    precision = decision.fp8_recipe or goal.precision.value
    run = decision_fields(model, decision, precision=precision, core=core)
    if run["pipeline_model_parallel_layout"] is not None:
        # The layout implies the number of virtual stages.
        run["virtual_pipeline_model_parallel_size"] = None
    flags = (
        *_flags(model_fields(model)),
        *_model(model, goal, core=core),
        *_flags(run),
        *_flags(written(model, decision)),
        *_flags({"moe_aux_loss_coeff": goal.moe_aux_loss_coeff}),
        *_state(decision),
        ("--seq-length", str(goal.sequence_length)),
        ("--micro-batch-size", str(decision.micro_batch_size)),
        ("--global-batch-size", str(goal.global_batch_size)),
        ("--bf16",),
    )
    if device_kind == "cpu":
        flags = tuple(flag for flag in flags if flag not in _NEEDS_CUDA) + _ON_PROCESSORS
    # run.sh splits at spaces only, so no value may contain one.
    if any(word.split() != [word] for argument in flags for word in argument):
        raise ValueError(f"an argument contains a space: {flags}")
    return flags


def _model(model: ModelSpec, goal: TrainGoal, *, core: Core) -> Iterator[Argument]:
    """Yield the flags whose form differs from the fields'."""
    if is_hybrid(model):
        yield ("--spec", *_HYBRID_LAYERS[core])
    yield from _activation(model)
    if not model_fields(model)["add_bias_linear"]:
        yield ("--disable-bias-linear",)
    if model.architecture == NEMOTRON_H:
        yield ("--position-embedding-type", "none")
    else:
        yield ("--position-embedding-type", "rope")
        yield ("--rotary-base", str(round(model.rope_theta)))
    if model.attention.indexer is not None:
        yield ("--no-rope-fusion",)
    yield ("--max-position-embeddings", str(max(model.max_position, goal.sequence_length)))
    if not model.tie_word_embeddings:
        yield ("--untie-embeddings-and-output-weights",)
    attention = model.attention
    if attention.kind == "gqa" and attention.num_kv_heads != attention.num_heads:
        yield ("--group-query-attention",)
        yield ("--num-query-groups", str(attention.num_kv_heads))


def _activation(model: ModelSpec) -> Iterator[Argument]:
    if model.architecture == GPT_OSS:
        yield ("--quick-geglu",)
    elif model.ffn_is_gated:
        yield ("--swiglu",)
    elif model.architecture == NEMOTRON_H:
        yield ("--squared-relu",)
        # The engine fuses GELU with its bias unless told otherwise.
        yield ("--no-bias-gelu-fusion",)


def _flags(fields: Mapping[str, Value]) -> Iterator[Argument]:
    for name, value in fields.items():
        yield from _flag(name, value)


def _flag(name: str, value: Value) -> Iterator[Argument]:
    if name in _ELSEWHERE or value is None or value is False or _DEFAULTS.get(name) == value:
        return
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    if value is True:
        yield (flag,)
    elif name in _LISTS_OF_LAYERS:
        yield (flag, _pattern(value))
    elif name == "window_size" and isinstance(value, tuple):
        yield (flag, ",".join(map(str, value)))
    elif isinstance(value, tuple):
        yield (flag, *map(str, value))
    elif str(value).startswith("-"):
        # A pattern whose first layer is a dense network looks like a flag.
        yield (f"{flag}={value}",)
    else:
        yield (flag, f"{value:g}" if name == "layernorm_epsilon" else str(value))


def _pattern(value: Value) -> str:
    """Return Megatron's expression for a list of zeros and ones, e.g. `([0]*3+[1]*58)`."""
    runs = groupby(value) if isinstance(value, tuple) else ()
    return f"({'+'.join(f'[{entry}]*{len(tuple(run))}' for entry, run in runs)})"


def _state(decision: TrainDecision) -> Iterator[Argument]:
    if decision.zero_stage:
        yield ("--use-distributed-optimizer",)
    if decision.zero_stage in SHARDING:
        yield ("--use-megatron-fsdp",)
        yield ("--data-parallel-sharding-strategy", SHARDING[decision.zero_stage])
        yield ("--ckpt-format", "fsdp_dtensor")
    if decision.num_state_copies > 1:
        yield ("--num-distributed-optimizer-instances", str(decision.num_state_copies))
    yield from _flags(
        {
            "overlap_grad_reduce": decision.overlap_grad_reduce,
            "ddp_bucket_size": decision.ddp_bucket_size,
        }
    )
    if decision.overlap_param_gather:
        yield ("--overlap-param-gather",)
    if decision.gradient_bytes == 2:
        yield ("--grad-reduce-in-bf16",)
    if decision.optimizer_offload:
        yield ("--optimizer-cpu-offload",)
        yield ("--optimizer-offload-fraction", "1.0")
        yield ("--overlap-cpu-optimizer-d2h-h2d",)
        # The offloading optimizer is a variant of this one.
        yield ("--use-precision-aware-optimizer",)
    if decision.cuda_graph == "full_iteration":
        # A CUDA graph cannot wait for the host to read a value.
        yield ("--no-check-for-nan-in-loss-and-grad",)
    if decision.rank_order == PIPELINE_INSIDE_ORDER and decision.pipeline_model_parallel_size > 1:
        yield ("--use-tp-pp-dp-mapping",)


_START: Final = """\
: "${{MEGATRON_LM:?must name the folder of a Megatron-LM checkout}}"
{needs}mapfile -t ARGUMENTS < <(grep -v '^#' "$FILES/megatron_args.txt" | tr ' ' '\\n')

exec "${{LAUNCHER[@]}}" "$MEGATRON_LM/{program}" "${{ARGUMENTS[@]}}" \\
{local}{last}  ${{CHECKPOINTS:+--save "$CHECKPOINTS" --load "$CHECKPOINTS"}} "$@"
"""

_LAST: Final = """\
  ${EXIT_MINUTES:+--exit-duration-in-mins "$EXIT_MINUTES"} \\
"""

_NEEDS_LOCAL: Final = """\
: "${{CHECKPOINTS:+${{LOCAL_CHECKPOINTS:?must name a folder in the memory of every node}}}}"
LOCAL=(
{listed})
# Without a folder on shared storage nothing is saved to hosts either.
[[ -n "${{CHECKPOINTS:-}}" ]] || read -r -a LOCAL <<< ""
"""
