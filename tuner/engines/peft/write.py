"""Emits `finetune.json`, which examples/finetuning/finetune.py reads, and `run.sh`."""

import json
from pathlib import PurePosixPath
from typing import Any, Final

from profilers.steps.config import Recompute
from tuner.catalog.rules.decision import global_recompute
from tuner.config.train import TrainDecision
from tuner.engines.assumptions import assumptions
from tuner.engines.checkpoints import CheckpointSchedule, checkpoint_schedule
from tuner.engines.files import EmittedFile, comment
from tuner.engines.launchers.shape import launch_shape
from tuner.engines.launchers.torchrun import ENVIRONMENT_NOTE, preamble
from tuner.engines.peft.lora import lora_config
from tuner.engines.statement import statement
from tuner.plans.train import VerifiedPlan
from tuner.spec.goal import TrainGoal
from tuner.spec.linear_attention import LinearName
from tuner.spec.model import ModelSpec
from tuner.spec.tune import Adapters

_KERNELS: Final = {
    LinearName.MAMBA2: ("causal_conv1d", "mamba_ssm"),
    LinearName.GATED_DELTA: ("causal_conv1d", "fla"),
    LinearName.KDA: ("causal_conv1d", "fla"),
}
"""Packages whose kernels linear attention is priced with."""

_YOURS: Final = (
    "Not set here, because no plan depends on it: weights, data, learning rate, checkpoints.",
    "Add them after run.sh:",
    "  TRAIN=examples/finetuning/finetune.py bash run.sh --model FOLDER --tokens TOKENS.npy",
)


def emit(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the settings of the loop, and a script that starts it."""
    plan, decision = verified.plan, verified.decision
    said = (
        *statement(verified),
        *_checkpoints(checkpoint_schedule(verified)),
        *assumptions("transformers-peft", plan.model, plan.goal, decision),
        "",
        *_YOURS,
    )
    config = settings(plan.model, plan.goal, decision)
    return (
        EmittedFile(path=PurePosixPath("finetune.json"), text=json.dumps(config, indent=2) + "\n"),
        EmittedFile(path=PurePosixPath("README.txt"), text=comment(said, prefix="")),
        EmittedFile(
            path=PurePosixPath("run.sh"),
            text="#!/usr/bin/env bash\n"
            + comment(
                (
                    *said,
                    "",
                    *ENVIRONMENT_NOTE,
                    "  TRAIN                    examples/finetuning/finetune.py, or a program that",
                    "                           takes its arguments; needed",
                )
            )
            + preamble(launch_shape(plan, decision))
            + _START,
            executable=True,
        ),
    )


def _checkpoints(schedule: CheckpointSchedule | None) -> tuple[str, ...]:
    """Say what the loop lacks of a plan's checkpoints."""
    if schedule is None:
        return ()
    return (
        f"The forecast saves every {schedule.steps:,} steps. The loop saves at the end alone, so",
        "that a failure costs all steps before it.",
    )


def settings(model: ModelSpec, goal: TrainGoal, decision: TrainDecision) -> dict[str, Any]:
    """Return what the loop reads."""
    return {
        "sequence_length": goal.sequence_length,
        "micro_batch_size": decision.micro_batch_size,
        "gradient_accumulation_steps": decision.num_microbatches(goal.global_batch_size),
        "fully_shard": decision.zero_stage == 3,
        "gradient_checkpointing": global_recompute(model, decision) is Recompute.FULL,
        "adapters": None if goal.adapters is None else _adapters(goal.adapters, model),
        "kernels": [] if model.linear is None else list(_KERNELS[model.linear.kind]),
    }


def _adapters(tune: Adapters, model: ModelSpec) -> dict[str, Any]:
    return {
        "quantise": tune.is_quantised,
        "dtype": tune.dtype or "fp32",
        **lora_config(tune, model),
    }


_START: Final = """\
: "${TRAIN:?must name examples/finetuning/finetune.py, or a program with its arguments}"

exec "${LAUNCHER[@]}" "$TRAIN" --settings "$FILES/finetune.json" "$@"
"""
