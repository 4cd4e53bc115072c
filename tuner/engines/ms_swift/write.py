"""Emits arguments for Megatron-SWIFT: `swift_args.txt`, and `run.sh` that starts its program.

What the plan decides is written by Megatron-LM's emitter and renamed; the model's sizes are those
of the checkpoint's config.json, which the program reads. Settings that it has on by default are
written where they are off. `run.sh` starts what `megatron sft` starts, `swift.cli._megatron.sft`.

Read from the wheel ms-swift 4.6.0 (swift/megatron/arguments, swift/cli).
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from profilers.steps.config import Recompute
from tuner.config.train import TrainDecision
from tuner.engines.assumptions import assumptions
from tuner.engines.checkpoints import FOLDER_NOTE, CheckpointSchedule, checkpoint_schedule
from tuner.engines.files import EmittedFile, comment
from tuner.engines.launchers.shape import launch_shape
from tuner.engines.launchers.torchrun import ENVIRONMENT_NOTE, preamble
from tuner.engines.megatron_lm import write as megatron
from tuner.engines.megatron_lm.environment import environment
from tuner.engines.ms_swift.flags import megatron_flag, own_flag
from tuner.engines.statement import brief_statement, statement
from tuner.plans.train import VerifiedPlan
from tuner.spec.goal import TrainGoal
from tuner.spec.model import ModelSpec
from tuner.spec.tune import EXPERTS, NETWORK, adapted, matrices

Setting = tuple[str, str]
"""A field, and its value; several are apart by spaces."""

_ELSEWHERE: Final = frozenset(
    {
        "bf16",
        "hidden-dropout",
        "attention-dropout",
        "moe-flex-dispatcher-backend",
        "grad-reduce-in-bf16",
        "moe-router-enable-expert-bias",
    }
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
    """Return the file of arguments and a script that starts Megatron-SWIFT with it."""
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
            path=PurePosixPath("swift_args.txt"),
            text=comment((*brief_statement(verified), *warnings))
            + "".join(f"--{name} {value}\n" for name, value in lines),
        ),
        EmittedFile(
            path=PurePosixPath("run.sh"),
            text="#!/usr/bin/env bash\n"
            + comment(
                (
                    *statement(verified, schedule=schedule),
                    *warnings,
                    "",
                    *_YOURS,
                    "",
                    *ENVIRONMENT_NOTE,
                    *FOLDER_NOTE,
                )
            )
            + preamble(shape)
            + environment(decision)
            + _START,
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
        yield name, " ".join(values) or "true"
    # On by default, or off where the price takes it to be on.
    if not decision.zero_stage:
        yield "use_distributed_optimizer", "false"
    if decision.recompute is Recompute.NONE:
        yield "recompute_granularity", "none"
    if decision.gradient_bytes == 2:
        yield "main_grads_dtype", "bf16"
    if decision.gradient_bytes == 2 and not decision.optimizer_offload:
        yield "use_precision_aware_optimizer", "true"
    if decision.dispatcher == "deepep":
        yield "moe_enable_deepep", "true"
    # Sparse attention has none.
    yield "apply_rope_fusion", str(model.attention.indexer is None).lower()
    yield "attention_backend", "flash"
    yield "packing", "true"


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
    yield "target_modules", "all-linear" if every else " ".join(layers)


def _checkpoints(schedule: CheckpointSchedule | None, decision: TrainDecision) -> Iterator[Setting]:
    if schedule is None:
        return
    yield "save_steps", str(schedule.steps)
    if megatron.is_reshardable(schedule, decision):
        yield "dist_ckpt_optim_fully_reshardable", "true"
    if schedule.is_asynchronous:
        yield "async_save", "true"
        yield "use_persistent_ckpt_worker", "true"


_START: Final = """\
mapfile -t ARGUMENTS < <(grep -v '^#' "$FILES/swift_args.txt" | tr ' ' '\\n')

exec "${LAUNCHER[@]}" -m swift.cli._megatron.sft "${ARGUMENTS[@]}" \\
  ${CHECKPOINTS:+--output_dir "$CHECKPOINTS"} "$@"
"""
