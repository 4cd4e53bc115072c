"""Emits overrides for Megatron-Bridge: `overrides.txt`, `train.py` that applies them, and `run.sh`.

A recipe of `megatron.bridge.recipes` sets data, optimizer and everything else outside the plan;
overrides in Bridge's `section.field=value` form set what the plan decides, including options that
are off, because recipes have defaults of their own. Where a recipe of the release builds the model,
it is named; for any other model the overrides change the widths of the nearest one. Adapters start
from the recipe of adapters where the release has one of the model, else from that of pretraining.

`train.py` does what Bridge's `scripts/training/run_recipe.py` does, and replaces the name of the
precision by its configuration object first, so that overrides can set its fields.

Read from the tags v0.3.0, v0.4.0 and v0.5.0 of github.com/NVIDIA-NeMo/Megatron-Bridge.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from tuner.catalog.manifest import PIPELINE_INSIDE_ORDER
from tuner.config.train import TrainDecision
from tuner.engines.assumptions import assumptions
from tuner.engines.checkpoints import FOLDER_NOTE, KEPT, CheckpointSchedule, checkpoint_schedule
from tuner.engines.files import EmittedFile, comment
from tuner.engines.launchers.shape import LaunchShape, launch_shape
from tuner.engines.launchers.time_limit import LIMIT_NOTE, exit_minutes
from tuner.engines.launchers.torchrun import ENVIRONMENT_NOTE, preamble
from tuner.engines.megatron_bridge.lora import lora_arguments
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
from tuner.engines.megatron_lm.write import cautions, is_reshardable
from tuner.engines.priced_settings import overridden
from tuner.engines.statement import statement
from tuner.plans.train import VerifiedPlan
from tuner.spec.goal import TrainGoal
from tuner.spec.linear_attention import LinearName
from tuner.spec.model import ModelSpec, QkNorm
from tuner.spec.tune import Adapters

Override = tuple[str, Value]
"""Path of a field from the configuration's root, and its value."""

_RECIPES: Final = {
    ("DeepseekV2ForCausalLM", 27, 2048): "deepseek_v2_lite_pretrain_config",
    ("DeepseekV2ForCausalLM", 60, 5120): "deepseek_v2_pretrain_config",
    ("DeepseekV3ForCausalLM", 61, 7168): "deepseek_v3_pretrain_config",
    ("Glm4MoeForCausalLM", 46, 4096): "glm45_air_106b_pretrain_config",
    ("Glm4MoeForCausalLM", 92, 5120): "glm45_355b_pretrain_config",
    ("GptOssForCausalLM", 24, 2880): "gpt_oss_20b_pretrain_config",
    ("GptOssForCausalLM", 36, 2880): "gpt_oss_120b_pretrain_config",
    ("LlamaForCausalLM", 32, 4096): "llama31_8b_pretrain_config",
    ("LlamaForCausalLM", 80, 8192): "llama31_70b_pretrain_config",
    ("LlamaForCausalLM", 126, 16384): "llama31_405b_pretrain_config",
    (NEMOTRON_H, 52, 2688): "nemotron_3_nano_pretrain_config",
    (NEMOTRON_H, 118, 8192): "nemotronh_56b_pretrain_config",
    ("OlmoeForCausalLM", 16, 2048): "olmoe_7b_pretrain_config",
    ("Qwen3MoeForCausalLM", 48, 2048): "qwen3_30b_a3b_pretrain_config",
    ("Qwen3MoeForCausalLM", 94, 4096): "qwen3_235b_a22b_pretrain_config",
    ("Qwen3NextForCausalLM", 48, 2048): "qwen3_next_80b_a3b_pretrain_config",
}
"""Recipe of every release read, by architecture, layers and width."""

_FROM_0_4: Final = {(NEMOTRON_H, 88, 4096): "nemotron_3_super_pretrain_config"}
"""Recipes from v0.4.0 on, by architecture, layers and width."""

_PRETRAINING: Final = "_pretrain_config"
_WITH_ADAPTERS: Final = {
    Core.V0_16: "_finetune_config",
    Core.V0_17: "_peft_config",
    Core.V0_18: "_peft_config",
}
"""Ends of the names of recipes that train adapters; those of 0.3 train all weights if asked."""
_WITHOUT_ADAPTERS: Final = frozenset(
    f"{model}{_PRETRAINING}"
    for model in (
        "deepseek_v2_lite",
        "deepseek_v2",
        "deepseek_v3",
        "kimi_k2",
        # Its recipe raises NotImplementedError, or trains all weights in 0.3.
        "qwen3_next_80b_a3b",
    )
)
"""Recipes of models that have none of adapters in any release."""

_PLAIN: Final = "vanilla_gpt_pretrain_config"
"""Megatron-LM's defaults without a specific model; from v0.4.0 on."""

_HYBRID: Final = {
    Core.V0_16: "nemotron_3_nano_pretrain_config",
    Core.V0_17: "nemotron_3_super_pretrain_config",
    Core.V0_18: "nemotron_3_super_pretrain_config",
}
"""The nearest recipe of a hybrid."""

_KIMI_VOCABULARY: Final = 163_840
"""Kimi-K2 has the architecture name, layers and width of DeepSeek-V3; the vocabulary differs."""

_PRECISIONS: Final = {
    "bf16": "bf16_mixed",
    "fp8-delayed": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8-tensorwise": "bf16_with_fp8_current_scaling_mixed",
    "fp8-blockwise": "bf16_with_fp8_subchannel_scaling_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}


_OF_PRECISION: Final = frozenset({"fp8", "fp8_recipe", "fp4", "fp4_recipe"})
"""Fields that Bridge fills from the precision."""

_START: Final = """\
export RECIPE={recipe}
{minutes}SAVED=()
if [[ -n "${{CHECKPOINTS:-}}" ]]; then
  SAVED=("checkpoint.save=$CHECKPOINTS" "checkpoint.load=$CHECKPOINTS"{asynchronous})
{last}{local}fi

exec "${{LAUNCHER[@]}}" "$FILES/train.py" ${{SAVED[@]+"${{SAVED[@]}}"}} "$@"
"""

_LAST: Final = """\
  [[ -z "$EXIT_MINUTES" ]] || SAVED+=("train.exit_duration_in_mins=$EXIT_MINUTES")
"""

_LOCAL: Final = """\
  : "${{LOCAL_CHECKPOINTS:?must name a folder in the memory of every node}}"
  SAVED+=(
{words}  )
"""

_YOURS: Final = (
    "Not set here, because no plan depends on it: data, tokenizer, optimizer, learning rate.",
    "The recipe has them; add overrides of your own after run.sh:",
    "  bash run.sh train.train_iters=1000 optimizer.lr=1e-4 ...",
)

_PRETRAINED: Final = (
    "Adapters need the weights that they are beside, in Megatron's distributed format:",
    "  bash run.sh checkpoint.pretrained_checkpoint=FOLDER ...",
)


def emit(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return overrides, the program that applies them, and a script that starts it."""
    return _emit(verified, core=Core.V0_18)


def emit_26_04(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the same for the container 26.04, whose core is older."""
    return _emit(verified, core=Core.V0_17)


def emit_26_02(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the same for the container 26.02, which has no recipe of a plain model."""
    return _emit(verified, core=Core.V0_16)


def _emit(verified: VerifiedPlan, *, core: Core) -> tuple[EmittedFile, ...]:
    plan, decision = verified.plan, verified.decision
    exact, nearest = _recipe(plan.model, core=core)
    schedule = checkpoint_schedule(verified, removes_old=True)
    shape, is_local = launch_shape(plan, decision), has_local(schedule)
    recipe = adapter_recipe(plan.model, plan.goal.adapters, core=core) or exact or nearest
    named = bool(exact) or core is not Core.V0_16 or nearest != _PLAIN
    said = (
        *statement(verified, schedule=schedule),
        *cautions(plan.model, decision),
        *assumptions("megatron-bridge", plan.model, plan.goal, decision),
        f"Recipe: {recipe}." if named else "Recipe: none fits in this release; name a near one.",
        *_recipe_notes(plan.goal, recipe, named=named),
        *(NOTES if is_local else ()),
        "",
        *_YOURS,
        *(() if plan.goal.adapters is None else _PRETRAINED),
    )
    lines = (
        *overrides(plan.model, plan.goal, decision, core=core),
        *_checkpoints(schedule, decision),
    )
    text = "".join(f"{path}={_written(value)}\n" for path, value in lines)
    precision = _PRECISIONS[decision.fp8_recipe or plan.goal.precision.value]
    default = f'"${{RECIPE:-{recipe}}}"' if named else '"${RECIPE:?must name a recipe}"'
    return (
        EmittedFile(path=PurePosixPath("overrides.txt"), text=comment(said) + text),
        EmittedFile(
            path=PurePosixPath("train.py"),
            text=comment(said) + _program(plan.model, plan.goal, decision, precision, core=core),
        ),
        EmittedFile(
            path=PurePosixPath("run.sh"),
            text="#!/usr/bin/env bash\n"
            + comment(
                (
                    *said,
                    "",
                    *ENVIRONMENT_NOTE,
                    "  RECIPE                   a recipe of megatron.bridge.recipes",
                    *FOLDER_NOTE,
                    *(() if schedule is None else LIMIT_NOTE),
                    *(LOCAL_NOTE if is_local else ()),
                )
            )
            + preamble(shape)
            + environment(decision)
            + _START.format(
                recipe=default,
                asynchronous=" checkpoint.async_save=true"
                if schedule is not None and schedule.is_asynchronous
                else "",
                minutes="" if schedule is None else exit_minutes(schedule.ending_s),
                last="" if schedule is None else _LAST,
                local=_local(schedule, shape),
            ),
            executable=True,
        ),
    )


def _recipe_notes(goal: TrainGoal, recipe: str, *, named: bool) -> Iterator[str]:
    """Say what the recipe of adapters brings, or that there is none."""
    if goal.adapters is None:
        return
    if not named:
        yield "It has no recipe of adapters, so name one of pretraining, to which they are added."
    elif recipe.endswith(_PRETRAINING):
        yield "This release has no recipe of adapters for the model, so it is one of pretraining."
    else:
        yield "Its data are SQuAD of the Hub; samples are packed or padded to the sequence length."
        yield "Another recipe must be one of adapters, too."


def _checkpoints(
    schedule: CheckpointSchedule | None, decision: TrainDecision
) -> Iterator[Override]:
    if schedule is None:
        return
    yield "checkpoint.save_interval", schedule.steps
    yield "checkpoint.most_recent_k", KEPT
    if is_reshardable(schedule, decision):
        # Of v0.3.0 itself; v0.4.0 and v0.5.0 take it from Megatron-LM's CheckpointConfig.
        yield "checkpoint.dist_ckpt_optim_fully_reshardable", True


def _local(schedule: CheckpointSchedule | None, shape: LaunchShape) -> str:
    """Return the lines of bash that add when and where to save to hosts."""
    if schedule is None or not has_local(schedule):
        return ""
    words = (
        f'    "checkpoint.{name}={_written(value)}"\n'
        for name, value in local_settings(schedule, shape)
    )
    return _LOCAL.format(words="".join(words))


def _program(
    model: ModelSpec, goal: TrainGoal, decision: TrainDecision, precision: str, *, core: Core
) -> str:
    lora = lora_arguments(model, goal, core=core)
    start = _PRETRAIN if lora is None else _FINETUNE
    words = "".join(f"    {name}={value!r},\n" for name, value in (lora or {}).items())
    finetunes = bool(adapter_recipe(model, goal.adapters, core=core))
    return _TRAIN.format(
        precision=precision,
        in_fp32=decision.gradient_bytes == 4,
        imports=start["imports"],
        samples=_SAMPLES.format(multiple=_pack_multiple(decision)) if finetunes else "",
        adapters=start["adapters"].format(arguments=words),
        start=start["start"],
    )


def overrides(
    model: ModelSpec, goal: TrainGoal, decision: TrainDecision, *, core: Core = Core.V0_18
) -> tuple[Override, ...]:
    """Return every override that the plan decides.

    Raises:
        ValueError: stages differ in what is one setting for Megatron.
    """
    precision = decision.fp8_recipe or goal.precision.value
    fields = decision_fields(model, decision, precision=precision, core=core)
    is_exact = bool(_recipe(model, core=core)[0])
    finetunes = bool(adapter_recipe(model, goal.adapters, core=core))
    if not is_exact:
        fields = model_fields(model) | fields
    if core is not Core.V0_18:
        fields.pop("mlp_chunks_for_training", None)
    return (
        *(() if is_exact else _model(model)),
        *(_mtp_of_hybrid(core) if is_hybrid(model) else ()),
        *((f"model.{name}", value) for name, value in fields.items() if name not in _OF_PRECISION),
        *overridden(model, decision),
        *_balance(goal),
        *_pipeline(decision),
        *_state(decision),
        ("model.seq_length", goal.sequence_length),
        *(_finetuning(goal, decision) if finetunes else _pretraining(goal)),
        ("train.micro_batch_size", decision.micro_batch_size),
        ("train.global_batch_size", goal.global_batch_size),
    )


def _recipe(model: ModelSpec, *, core: Core) -> tuple[str, str]:
    """Return the recipe that builds the model, if any, and the nearest one."""
    key = (model.architecture, model.num_layers, model.hidden_size)
    exact = _RECIPES.get(key, "") or (_FROM_0_4.get(key, "") if core is not Core.V0_16 else "")
    if exact == "deepseek_v3_pretrain_config" and model.vocab_size == _KIMI_VOCABULARY:
        exact = "kimi_k2_pretrain_config"
    if is_hybrid(model):
        return exact, _HYBRID[core]
    if model.linear is not None and model.linear.kind is LinearName.GATED_DELTA:
        return exact, "qwen3_next_80b_a3b_pretrain_config"
    if model.attention.kind == "mla":
        return exact, "deepseek_v3_pretrain_config"
    if model.architecture == GPT_OSS:
        return exact, "gpt_oss_20b_pretrain_config"
    if model.attention.qk_norm is QkNorm.FULL:
        return exact, "olmoe_7b_pretrain_config"
    return exact, _PLAIN


def adapter_recipe(model: ModelSpec, adapters: Adapters | None, *, core: Core) -> str:
    """Return the recipe that trains adapters of the model; empty: there is none, or need."""
    exact, _ = _recipe(model, core=core)
    if adapters is None or not exact or exact in _WITHOUT_ADAPTERS:
        return ""
    return exact.removesuffix(_PRETRAINING) + _WITH_ADAPTERS[core]


def _pretraining(goal: TrainGoal) -> Iterator[Override]:
    yield ("dataset.sequence_length", goal.sequence_length)


def _finetuning(goal: TrainGoal, decision: TrainDecision) -> Iterator[Override]:
    """Yield what the data of a recipe of adapters have, and what they need of the rest."""
    yield ("dataset.seq_length", goal.sequence_length)
    if not _can_pack(decision):
        yield ("dataset.packed_sequence_specs", None)
    if decision.context_parallel_size > 1:
        yield ("model.calculate_per_token_loss", True)
        yield ("ddp.average_in_collective", False)


def _can_pack(decision: TrainDecision) -> bool:
    """Return whether samples may be packed: micro-batches of one sample, and no CUDA graphs."""
    return decision.micro_batch_size == 1 and decision.cuda_graph == "none"


def _pack_multiple(decision: TrainDecision) -> int:
    """Tokens whose multiple each packed sample is padded to."""
    ranks = decision.context_parallel_size
    return 2 * ranks if ranks > 1 else 1


def _model(model: ModelSpec) -> Iterator[Override]:
    """Yield the model's settings outside megatron-core's configuration."""
    yield ("model.vocab_size", model.vocab_size)
    # The null tokenizer adds a token of its own.
    yield ("tokenizer.vocab_size", model.vocab_size - 1)
    yield ("model.share_embeddings_and_output_weights", model.tie_word_embeddings)
    if model.attention.kind == "gqa":
        has_positions = model.architecture != NEMOTRON_H
        yield ("model.position_embedding_type", "rope" if has_positions else "none")
    yield ("model.rotary_base", round(model.rope_theta))


def _mtp_of_hybrid(core: Core) -> Iterator[Override]:
    """Yield what makes the pattern alone say the MTP layers; a recipe runs one of them twice."""
    if core is not Core.V0_16:
        yield ("model.mtp_hybrid_override_pattern", None)
        yield ("model.mtp_use_repeated_layer", False)


def _balance(goal: TrainGoal) -> Iterator[Override]:
    if goal.moe_aux_loss_coeff is not None:
        yield ("model.moe_aux_loss_coeff", goal.moe_aux_loss_coeff)


def _pipeline(decision: TrainDecision) -> Iterator[Override]:
    yield ("model.account_for_embedding_in_pipeline_split", False)
    yield ("model.account_for_loss_in_pipeline_split", False)
    yield ("model.num_layers_in_first_pipeline_stage", None)
    yield ("model.num_layers_in_last_pipeline_stage", None)
    # The overrides here replace what this section would set.
    yield ("comm_overlap", None)
    virtual = decision.virtual_pipeline_model_parallel_size > 1
    yield ("model.overlap_p2p_comm", virtual)
    yield ("model.batch_p2p_comm", not virtual)
    last = decision.rank_order == PIPELINE_INSIDE_ORDER
    yield ("dist.use_tp_pp_dp_mapping", last and decision.pipeline_model_parallel_size > 1)


def _state(decision: TrainDecision) -> Iterator[Override]:
    sharded = decision.zero_stage > 0
    fsdp = decision.zero_stage in SHARDING
    yield ("ddp.use_distributed_optimizer", sharded)
    yield ("optimizer.use_distributed_optimizer", sharded)
    yield ("dist.use_megatron_fsdp", fsdp)
    yield ("ddp.use_megatron_fsdp", fsdp)
    if fsdp:
        yield ("ddp.data_parallel_sharding_strategy", SHARDING[decision.zero_stage])
        yield ("checkpoint.ckpt_format", "fsdp_dtensor")
        yield ("ddp.average_in_collective", False)
    yield ("ddp.num_distributed_optimizer_instances", decision.num_state_copies)
    yield ("ddp.overlap_grad_reduce", decision.overlap_grad_reduce)
    # None, because a recipe may state a size.
    yield ("ddp.bucket_size", decision.ddp_bucket_size)
    yield ("ddp.overlap_param_gather", decision.overlap_param_gather)
    yield ("optimizer.overlap_param_gather", decision.overlap_param_gather)
    yield ("optimizer.optimizer_cpu_offload", decision.optimizer_offload)
    if decision.optimizer_offload:
        yield ("optimizer.optimizer_offload_fraction", 1.0)
        yield ("optimizer.overlap_cpu_optimizer_d2h_h2d", True)
        # The offloading optimizer is a variant of this one.
        yield ("optimizer.use_precision_aware_optimizer", True)
    if decision.cuda_graph != "none":
        yield ("rng.te_rng_tracker", True)
        yield ("model.use_te_rng_tracker", True)
    if decision.cuda_graph == "full_iteration":
        # A CUDA graph cannot wait for the host to read a value.
        yield ("rerun_state_machine.check_for_nan_in_loss", False)
        yield ("ddp.check_for_nan_in_grad", False)


def _written(value: Value) -> str:
    if isinstance(value, tuple):
        return f"[{','.join(map(_written, value))}]"
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    # `|`, `*`, `/` and `-` of layers' letters are operators in the grammar of overrides.
    return f"'{value}'" if isinstance(value, str) and set("|*/-") & set(value) else str(value)


_PRETRAIN: Final = {
    "imports": "from megatron.bridge.training.pretrain import pretrain\n",
    "adapters": "",
    "start": "pretrain",
}
_FINETUNE: Final = {
    "imports": "from megatron.bridge.peft.lora import LoRA\n"
    "from megatron.bridge.training.finetune import finetune\n",
    "adapters": """\
config.peft = LoRA(
{arguments})
""",
    "start": "finetune",
}

_SAMPLES: Final = """\
whole = {{"pad_to_max_length": True}}
config.dataset.dataset_kwargs = (config.dataset.dataset_kwargs or {{}}) | whole
packs = config.dataset.packed_sequence_specs
if packs is not None:
    packs.packed_sequence_size, packs.pad_seq_to_mult = config.dataset.seq_length, {multiple}
"""

_TRAIN: Final = """\
import os
import sys
from pathlib import Path

from megatron.bridge import recipes
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.mixed_precision import get_mixed_precision_config
{imports}from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

config = getattr(recipes, os.environ["RECIPE"])()
config.mixed_precision = get_mixed_precision_config("{precision}")
config.mixed_precision.grad_reduce_in_fp32 = {in_fp32}
written = Path(__file__).with_name("overrides.txt").read_text(encoding="utf-8").splitlines()
overrides = [line for line in written if line and not line.startswith("#")]
config = process_config_with_overrides(config, cli_overrides=[*overrides, *sys.argv[1:]])
{samples}{adapters}{start}(config=config, forward_step_func=forward_step)
"""
