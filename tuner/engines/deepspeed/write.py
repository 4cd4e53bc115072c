"""Emits `deepspeed.json`, a `README.txt` for the author of the training program, and `run.sh`.

DeepSpeed runs a model of the user's own code: the JSON decides batch, precision, ZeRO, AutoTP,
AutoEP and the number of stages; the pipeline itself (`PipelineModule`) and recomputation are built
by that code, as the README describes. Field names were read from the package deepspeed 0.19.8.
Where adapters are trained, `adapters.json` holds arguments of PEFT's LoraConfig.

DeepSpeed saves when the program calls `save_checkpoint`, and removes nothing: no field of the JSON
says when or how many. run.sh hands both to the program, which examples/engines/deepspeed/train.py
reads. `parallel_write.pipeline_stage` divides the layers of a stage over its replicas, which each
write some (`PipelineModule.save_state_dict`).
"""

import json
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from profilers.steps.config import Recompute
from tuner.catalog.rules.decision import global_recompute
from tuner.config.train import TrainDecision
from tuner.engines.assumptions import assumptions
from tuner.engines.checkpoints import FOLDER_NOTE, KEPT, CheckpointSchedule, checkpoint_schedule
from tuner.engines.files import EmittedFile, comment
from tuner.engines.launchers.shape import launch_shape
from tuner.engines.launchers.torchrun import ENVIRONMENT_NOTE, preamble
from tuner.engines.peft.lora import lora_config
from tuner.engines.statement import statement
from tuner.plans.train import VerifiedPlan
from tuner.spec.goal import Precision, TrainGoal
from tuner.spec.model import ModelSpec
from tuner.spec.tune import Adapters

_PRESETS: Final = {
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "MixtralForCausalLM": "mixtral",
    "Qwen2MoeForCausalLM": "qwen3_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
}
"""AutoEP presets by architecture."""

_PARTITIONS: Final = {
    "use_default_specs": False,
    "layer_specs": [
        {
            "patterns": [
                r".*\.self_attn\.([qkv]|q_b|kv_b)_proj\.weight$",
                r".*\.(mlp|shared_experts?)\.(gate|up)_proj\.weight$",
            ],
            "partition_type": "column",
        },
        {
            "patterns": [
                r".*\.self_attn\.o_proj\.weight$",
                r".*\.(mlp|shared_experts?)\.down_proj\.weight$",
            ],
            "partition_type": "row",
        },
    ],
}
"""AutoTP of a MoE model of transformers: attention, dense and shared experts. The plan that
transformers ships (`base_model_tp_plan`) also splits experts, and AutoTP then refuses the whole
plan."""

STAND_IN_LEARNING_RATE: Final = 1e-4

_YOURS: Final = (
    "Not set here, because no plan depends on it: data, tokenizer, optimizer,",
    "learning rate. They belong to your program, which TRAIN names:",
    "  TRAIN=train.py bash run.sh [arguments of the program]",
)


def emit(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the configuration, the requirements on the program, and a script that starts it."""
    plan, decision = verified.plan, verified.decision
    schedule = checkpoint_schedule(verified, removes_old=True)
    said = (
        *statement(verified, schedule=schedule),
        *(() if schedule is None else (_REMOVES,)),
        *assumptions("deepspeed", plan.model, plan.goal, decision),
        "",
        *_YOURS,
    )
    config = configuration(plan.model, plan.goal, decision)
    if schedule is not None and decision.pipeline_model_parallel_size > 1:
        config["checkpoint"] = {"parallel_write": {"pipeline_stage": True}}
    tune = plan.goal.adapters
    return (
        EmittedFile(path=PurePosixPath("deepspeed.json"), text=json.dumps(config, indent=2) + "\n"),
        *(() if tune is None else (_adapters(tune, plan.model),)),
        EmittedFile(
            path=PurePosixPath("README.txt"),
            text=comment((*said, "", *_requirements(verified, config, schedule)), prefix=""),
        ),
        EmittedFile(
            path=PurePosixPath("run.sh"),
            text="#!/usr/bin/env bash\n"
            + comment(
                (
                    *said,
                    "",
                    *ENVIRONMENT_NOTE,
                    "  TRAIN                    your training program; needed",
                    *(() if schedule is None else (*FOLDER_NOTE, *_SAVES)),
                )
            )
            + preamble(launch_shape(plan, decision))
            + _START.format(
                saves="" if schedule is None else _SAVING.format(steps=schedule.steps, kept=KEPT),
                adapters="" if tune is None else _NAME_ADAPTERS,
            ),
            executable=True,
        ),
    )


def _adapters(tune: Adapters, model: ModelSpec) -> EmittedFile:
    text = json.dumps(lora_config(tune, model), indent=2) + "\n"
    return EmittedFile(path=PurePosixPath("adapters.json"), text=text)


def configuration(model: ModelSpec, goal: TrainGoal, decision: TrainDecision) -> dict[str, Any]:
    """Return DeepSpeed's configuration as it is read from JSON."""
    tensor, experts = decision.tensor_model_parallel_size, decision.expert_model_parallel_size
    config: dict[str, Any] = {
        "train_batch_size": goal.global_batch_size,
        "train_micro_batch_size_per_gpu": decision.micro_batch_size,
        "gradient_accumulation_steps": decision.num_microbatches(goal.global_batch_size),
        "data_types": {"grad_accum_dtype": "fp32" if decision.gradient_bytes == 4 else "bf16"},
        "zero_optimization": _zero(decision),
        # Without both, DeepSpeed prints no steps.
        "log_level": "info",
        "steps_per_print": 1,
    }
    if goal.precision is Precision.BF16:
        config["bf16"] = {"enabled": True}
    if global_recompute(model, decision) is Recompute.FULL:
        # Enables nothing by itself: activations that the program checkpoints are not partitioned.
        config["activation_checkpointing"] = {"partition_activations": False}
    if tensor > 1:
        # DeepSpeed counts every tensor-parallel rank as a replica unless a program passes an `mpu`,
        # and refuses a batch that disagrees.
        del config["train_batch_size"]
        config["tensor_parallel"] = {"autotp_size": tensor}
        if experts > 1:
            config["tensor_parallel"]["partition_config"] = _PARTITIONS
    if decision.pipeline_model_parallel_size > 1:
        full = global_recompute(model, decision) is Recompute.FULL
        config["pipeline"] = {
            "stages": decision.pipeline_model_parallel_size,
            "partition": "uniform",
            "activation_checkpoint_interval": int(full),
        }
    elif experts > 1:
        config["expert_parallel"] = _experts(model, goal, decision)
        config["optimizer"] = {"type": "AdamW", "params": {"lr": STAND_IN_LEARNING_RATE}}
    return config


def _zero(decision: TrainDecision) -> dict[str, Any]:
    section: dict[str, Any] = {
        "stage": decision.zero_stage,
        "overlap_comm": decision.overlap_grad_reduce or decision.overlap_param_gather,
    }
    if decision.optimizer_offload:
        section["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    return section


def _experts(model: ModelSpec, goal: TrainGoal, decision: TrainDecision) -> dict[str, Any]:
    section: dict[str, Any] = {
        "enabled": True,
        "autoep_size": decision.expert_model_parallel_size,
        "expert_tensor_parallel_size": 1,
        "comm_backend": "deepep" if decision.dispatcher == "deepep" else "comm",
    }
    preset = _PRESETS.get(model.architecture)
    if preset:
        section["preset_model"] = preset
    if decision.dispatcher == "deepep":
        section["comm_max_tokens_per_rank"] = decision.micro_batch_size * goal.sequence_length
    return section


def _requirements(
    verified: VerifiedPlan, config: Mapping[str, Any], schedule: CheckpointSchedule | None
) -> tuple[str, ...]:
    """Say what the user's program must do for the plan to hold."""
    model, decision = verified.plan.model, verified.decision
    lines = ["What your program must do:"]
    if decision.pipeline_model_parallel_size > 1:
        stage_layers = decision.pipeline_layout[0]
        lines.append(
            f"- The model is a deepspeed.pipe.PipelineModule of {len(decision.pipeline_layout)} "
            f"stages with {stage_layers} layers each; the embedding is on the first, the head on "
            "the last."
        )
    if global_recompute(model, decision) is Recompute.FULL:
        lines.append("- Every layer is recomputed: turn on gradient checkpointing in the model.")
    else:
        lines.append("- Nothing is recomputed: leave gradient checkpointing off.")
    if verified.plan.goal.adapters is not None:
        lines += _ADAPTED
    experts = decision.expert_model_parallel_size
    if experts > 1 and decision.pipeline_model_parallel_size > 1:
        lines.append(
            "- AutoEP finds MoE layers in a model, not in a pipeline: build them with "
            f"deepspeed.moe.layer.MoE and ep_size {experts}."
        )
    elif experts > 1 and model.architecture not in _PRESETS:
        lines.append(
            "- AutoEP does not know this architecture: add moe_layer_pattern, router_pattern and "
            "expert_pattern to expert_parallel."
        )
    if "optimizer" in config:
        lines.append(
            "- AutoEP creates the optimizer, so that expert parameters get a parameter group of "
            "their own: pass none to deepspeed.initialize, and set the learning rate in "
            f"deepspeed.json, where {STAND_IN_LEARNING_RATE:g} is a placeholder."
        )
    if "train_batch_size" not in config:
        lines.append(
            "- DeepSpeed counts tensor-parallel ranks as replicas and prints a batch and samples/s "
            f"{decision.tensor_model_parallel_size} times too high; moetune verify corrects that."
        )
    if schedule is not None:
        lines += _SAVED
    lines.append(
        "- Read the file that --deepspeed_config names (deepspeed.add_config_arguments) and "
        "call deepspeed.initialize."
    )
    return tuple(lines)


_ADAPTED: Final = (
    "- The model gets adapters before deepspeed.initialize (get_peft_model): --adapters names the "
    "arguments of PEFT's LoraConfig.",
    "- Before that it calls enable_input_require_grads: without it autograd enters no recomputed "
    "layer.",
    "- The optimizer gets parameters with requires_grad alone.",
)

_SAVES: Final = (
    "  SAVE_STEPS               steps between checkpoints; by default as planned",
    "  KEPT_CHECKPOINTS         how many finished ones to keep beside the one that is written",
)

_REMOVES: Final = (
    "DeepSpeed removes no checkpoint: your program does, all but the last KEPT_CHECKPOINTS."
)

_SAVED: Final = (
    "- Where CHECKPOINTS is set, every rank calls load_checkpoint(CHECKPOINTS) at the start, which "
    "takes the newest finished one,",
    "  and save_checkpoint(CHECKPOINTS) every SAVE_STEPS steps. One rank then removes all but "
    "KEPT_CHECKPOINTS. run.sh sets both",
    "  numbers; the train.py of moetune's examples for DeepSpeed reads them.",
)

_SAVING: Final = """\
[[ -z "${{CHECKPOINTS:-}}" ]] || export CHECKPOINTS
export SAVE_STEPS="${{SAVE_STEPS:-{steps}}}" KEPT_CHECKPOINTS="${{KEPT_CHECKPOINTS:-{kept}}}"
"""

_START: Final = """\
: "${{TRAIN:?must name your training program}}"
{saves}
exec "${{LAUNCHER[@]}}" "$TRAIN" --deepspeed_config "$FILES/deepspeed.json" {adapters}"$@"
"""
_NAME_ADAPTERS: Final = '--adapters "$FILES/adapters.json" '
