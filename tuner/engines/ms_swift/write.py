"""Emits settings for Megatron-SWIFT: `sft.yaml`, and `run.sh` that starts `megatron sft` with it.

What the plan decides is written by Megatron-LM's emitter and renamed; the model's sizes are those of
the checkpoint's config.json, which the program reads. Settings that it has on by default are
written where they are off. The command starts torchrun itself, by the variables that `run.sh` sets.

Read from the wheel ms-swift 4.6.0 (swift/megatron/arguments, swift/cli).
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from profilers.steps.config import Recompute
from tuner.config.train import TrainDecision
from tuner.engines.assumptions import assumptions
from tuner.engines.checkpoints import CheckpointSchedule, checkpoint_schedule
from tuner.engines.files import EmittedFile, comment
from tuner.engines.launchers.shape import LaunchShape, launch_shape
from tuner.engines.launchers.torchrun import preamble
from tuner.engines.megatron_lm import write as megatron
from tuner.engines.megatron_lm.environment import environment
from tuner.engines.ms_swift.flags import OFF, megatron_flag, own_flag
from tuner.engines.statement import brief_statement, statement
from tuner.plans.train import VerifiedPlan
from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec
from tuner.spec.tune import EXPERTS, NETWORK, adapted, matrices

Setting = tuple[str, str]
"""A field, and its value as YAML."""

_ELSEWHERE: Final = frozenset(
    {"bf16", "hidden-dropout", "attention-dropout", "moe-flex-dispatcher-backend", "use-flash-attn"}
)
"""Flags of Megatron-LM that have no field, or one that another setting decides."""

_LAYERS: Final = {
    "q_proj": "linear_qkv",
    "k_proj": "linear_qkv",
    "v_proj": "linear_qkv",
    "o_proj": "linear_proj",
    "q_a_proj": "linear_q_down_proj",
    "q_b_proj": "linear_q_up_proj",
    "kv_a_proj_with_mqa": "linear_kv_down_proj",
    "kv_b_proj": "linear_kv_up_proj",
    "out_proj": "out_proj",
    **dict.fromkeys((*NETWORK, EXPERTS), "linear_fc1 linear_fc2"),
}
"""Adapted matrices: the layers of megatron-core that hold them; `in_proj` holds all others."""

_YOURS: Final = (
    "Not set here, because no plan depends on it: model, data, optimizer, learning rate. Add them",
    "after run.sh:  bash run.sh --model ... --dataset ... --num_train_epochs ... --lr ...",
    "An apex that is installed, or its absence, decides gradient_accumulation_fusion.",
)


def emit(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the file of settings and a script that starts Megatron-SWIFT with it."""
    plan, decision = verified.plan, verified.decision
    schedule = checkpoint_schedule(verified, retains=True)
    shape = launch_shape(plan, decision)
    warnings = (
        *megatron.cautions(plan.model, decision),
        *assumptions("ms-swift", plan.model, plan.goal, decision),
    )
    lines = (*settings(plan.model, plan.goal, decision), *_checkpoints(schedule, decision))
    return (
        EmittedFile(
            path=PurePosixPath("sft.yaml"),
            text=comment((*brief_statement(verified), *warnings))
            + "".join(f"{name}: {value}\n" for name, value in lines),
        ),
        EmittedFile(
            path=PurePosixPath("run.sh"),
            text="#!/usr/bin/env bash\n"
            + comment((*statement(verified, schedule=schedule), *warnings, "", *_YOURS))
            + preamble(shape, one_node=_ONE_NODE)
            + environment(decision)
            + _start(shape, has_checkpoints=schedule is not None),
            executable=True,
        ),
    )


def settings(model: ModelSpec, goal: TrainGoal, decision: TrainDecision) -> Iterator[Setting]:
    """Yield every setting that the plan decides.

    Raises:
        ValueError: stages differ in what is one setting.
    """
    yield "torch_dtype", "bfloat16"
    yield from _tuned(model, goal)
    for flag, *values in megatron.arguments(model, goal, decision):
        name = own_flag(flag).removeprefix("--")
        if megatron_flag(name) is None or flag.removeprefix("--") in _ELSEWHERE:
            continue
        yield name, _value(values)
    # On by default, or off where the price takes it to be on.
    if not decision.zero_stage:
        yield "use_distributed_optimizer", "false"
    if decision.recompute is Recompute.NONE:
        yield "recompute_granularity", "none"
    if decision.dispatcher == "deepep":
        yield "moe_enable_deepep", "true"
    yield "cross_entropy_fusion_impl", "te"
    yield "apply_rope_fusion", str(OFF["apply_rope_fusion"][0] not in _off(model)).lower()
    yield "attention_backend", "flash"
    yield "packing", "true"


def _off(model: ModelSpec) -> frozenset[str]:
    """Fusions that the model excludes, as Megatron-LM's emitter writes them."""
    return frozenset({"no-rope-fusion"} if model.attention.indexer is not None else ())


def _value(values: list[str]) -> str:
    if not values:
        return "true"
    if len(values) > 1:
        return f"[{', '.join(values)}]"
    return values[0] if values[0].replace(".", "").isalnum() else f'"{values[0]}"'


def _tuned(model: ModelSpec, goal: TrainGoal) -> Iterator[Setting]:
    tune = goal.adapters
    if tune is None:
        yield "tuner_type", "full"
        return
    names = adapted(tune, model)
    layers = dict.fromkeys(" ".join(_LAYERS.get(name, "in_proj") for name in names).split())
    every = set(names) == set(matrices(model))
    yield "tuner_type", "lora"
    yield "lora_rank", str(tune.rank)
    yield "lora_alpha", f"{tune.effective_alpha:g}"
    yield "target_modules", "[all-linear]" if every else f"[{', '.join(layers)}]"


def _checkpoints(schedule: CheckpointSchedule | None, decision: TrainDecision) -> Iterator[Setting]:
    if schedule is None:
        return
    yield "save_steps", str(schedule.steps)
    if megatron.is_reshardable(schedule, decision):
        yield "dist_ckpt_optim_fully_reshardable", "true"
    if schedule.is_asynchronous:
        yield "async_save", "true"
        yield "use_persistent_ckpt_worker", "true"


_ONE_NODE: Final = """\
  export GLOO_SOCKET_IFNAME=lo
  export NCCL_SOCKET_IFNAME="=lo"
"""

_START: Final = """\
# `megatron` starts torchrun with these.
export NNODES NPROC_PER_NODE{several}
exec megatron sft "$FILES/sft.yaml" {saved}"$@"
"""


def _start(shape: LaunchShape, *, has_checkpoints: bool) -> str:
    several = " NODE_RANK MASTER_ADDR" if shape.nodes > 1 else ""
    port = '\nexport MASTER_PORT="${MASTER_PORT:-29500}"' if shape.nodes > 1 else ""
    saved = '${CHECKPOINTS:+--output_dir "$CHECKPOINTS"} ' if has_checkpoints else ""
    return _START.format(several=several + port, saved=saved)
