"""Emits `torchtitan.toml`, `moetune_plan.py` that passes it to torchtitan 0.3, and `run.sh`.

The tables of the TOML are sections of torchtitan's configuration, their keys its fields. Release
0.3 takes a configuration from a Python function (`--module moetune_plan --config plan`), so
`moetune_plan.py` starts from the configuration of a model that the release ships and replaces those
sections; torchtitan's classes check every name and value. Adapters (`lora`) are a converter of the
model's configuration. The layers of each pipeline stage are
written out (`module_fqns_per_model_part`), because torchtitan's division counts embedding and head
as layers.

A model that the release does not ship needs a module and a function of the user, which gets the
plan's dispatcher and attention backend if it has arguments of those names.

Read from the package torchtitan 0.3.0.
"""

import json
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Final

from profilers.steps.config import Recompute
from tuner.catalog.rules.decision import global_recompute
from tuner.config.train import TrainDecision
from tuner.engines.assumptions import assumptions
from tuner.engines.checkpoints import FOLDER_NOTE, KEPT, CheckpointSchedule, checkpoint_schedule
from tuner.engines.files import EmittedFile, comment
from tuner.engines.launchers.shape import launch_shape
from tuner.engines.launchers.torchrun import ENVIRONMENT_NOTE, preamble
from tuner.engines.statement import statement
from tuner.engines.targets import programs
from tuner.engines.torchtitan.lora import lora_fields
from tuner.plans.train import VerifiedPlan
from tuner.spec.features import ModelFeature, features
from tuner.spec.goal import Precision, TrainGoal
from tuner.spec.model import ModelSpec

Value = bool | int | float | str | list[str] | list[list[str]]
Sections = dict[str, dict[str, Value]]
"""Values by section and field."""

_MODELS: Final = {
    ("DeepseekV2ForCausalLM", 27, 2048): ("deepseek_v3", "deepseek_v3_16b", "16B"),
    ("DeepseekV2ForCausalLM", 60, 5120): ("deepseek_v3", "deepseek_v3_671b", "236B"),
    ("DeepseekV3ForCausalLM", 61, 7168): ("deepseek_v3", "deepseek_v3_671b", "671B"),
    ("GptOssForCausalLM", 24, 2880): ("gpt_oss", "gpt_oss_20b", "20b"),
    ("GptOssForCausalLM", 36, 2880): ("gpt_oss", "gpt_oss_120b", "120b"),
    ("LlamaForCausalLM", 32, 4096): ("llama3", "llama3_8b", "8B"),
    ("LlamaForCausalLM", 80, 8192): ("llama3", "llama3_70b", "70B"),
    ("LlamaForCausalLM", 126, 16384): ("llama3", "llama3_70b", "405B"),
    ("Qwen3MoeForCausalLM", 48, 2048): ("qwen3", "qwen3_30b_a3b", "30B-A3B"),
    ("Qwen3MoeForCausalLM", 94, 4096): ("qwen3", "qwen3_30b_a3b", "235B-A22B"),
    ("Qwen3_5MoeForConditionalGeneration", 60, 4096): (
        "qwen3_5",
        "qwen35_397b_a17b",
        "397B-A17B",
    ),
}
"""Module, base configuration and flavor, by architecture, layers and width; a flavor without a
configuration, or with one in fp8, uses that of another flavor."""

_DEEPSEEK_V3_VOCABULARY: Final = 129_280
"""Kimi-K2 has the architecture name, layers and width of DeepSeek-V3."""

_VARLEN: Final = frozenset({"GptOssForCausalLM"})
"""Architectures whose default attention backend is varlen; the others use flex."""

_WITH_VISION: Final = frozenset({"qwen3_5"})
"""Modules whose models begin with a vision tower, which no plan prices."""

_DISPATCHERS: Final = {"alltoall": "standard", "deepep": "deepep", "hybridep": "hybridep"}

_YOURS: Final = (
    "Not set here, because no plan depends on it: data, tokenizer, optimizer,",
    "learning rate. Add them after run.sh, in torchtitan's own form:",
    "  bash run.sh --training.steps 1000 --hf_assets_path ... --optimizer.lr 1e-4",
)

_PINNED: Final = (
    "A checkpoint is copied into pinned memory of the host, which each rank keeps for its part of",
    'the state, and another process writes it; async_mode "async" copies it into new memory.',
)

_PRETRAINED: Final = (
    "Adapters need the weights that they are beside, else random ones are adapted. Name a folder",
    "in Hugging Face's format by its absolute path:",
    "  bash run.sh --checkpoint.enable --checkpoint.initial_load_in_hf \\",
    "    --checkpoint.initial_load_path FOLDER ...",
)
"""A checkpoint in torchtitan's own format must hold the adapters, too (`dcp_load`)."""


def emit(verified: VerifiedPlan) -> tuple[EmittedFile, ...]:
    """Return the sections, the program that applies them, and a script that starts it."""
    plan, decision = verified.plan, verified.decision
    shipped = _shipped_model(plan.model)
    schedule = checkpoint_schedule(verified, removes_old=True)
    devices = plan.provenance.kind_of_devices
    able = programs(plan.emit).capabilities(device_kind=devices).pinned_checkpoints
    from_pinned = able and schedule is not None and schedule.is_asynchronous
    said = (
        *statement(verified, schedule=schedule),
        *(_PINNED if from_pinned else ()),
        (
            f"Model: {shipped[0]} {shipped[2]} of torchtitan."
            if shipped
            else "Model: torchtitan ships none of these widths; MODULE and CONFIG name yours."
        ),
        *_cautions(plan.model),
        *assumptions("torchtitan", plan.model, plan.goal, decision),
        "",
        *_YOURS,
        *(() if plan.goal.adapters is None else _PRETRAINED),
    )
    config = sections(plan.model, plan.goal, decision, on_processors=devices == "cpu")
    config |= _checkpoints(schedule, from_pinned=from_pinned)
    return (
        EmittedFile(path=PurePosixPath("torchtitan.toml"), text=comment(said) + _toml(config)),
        EmittedFile(
            path=PurePosixPath("moetune_plan.py"),
            text=comment(said) + _BUILD + ("" if plan.goal.adapters is None else _ADAPT) + _PLAN,
        ),
        EmittedFile(
            path=PurePosixPath("run.sh"),
            text="#!/usr/bin/env bash\n"
            + comment(
                (
                    *said,
                    "",
                    *ENVIRONMENT_NOTE,
                    "  MODULE, CONFIG           your own module and its function, as torchtitan's",
                    "                           --module and --config take them",
                    "  ATTENTION                flex; varlen (no context parallelism); flex_flash",
                    "                           (Hopper and Blackwell); sdpa, on processors, for",
                    "                           your own module alone",
                    "  TRAIN_FILE               the module that is started, as in torchtitan's own",
                    "                           run_train.sh; by default torchtitan.train",
                    *FOLDER_NOTE,
                )
            )
            + preamble(launch_shape(plan, decision))
            + ("" if shipped else _NAMES_NEEDED)
            + _START,
            executable=True,
        ),
    )


def _cautions(model: ModelSpec) -> Iterator[str]:
    shipped = _shipped_model(model)
    if shipped and shipped[0] in _WITH_VISION:
        yield "The model begins with a vision tower, which the plan does not price."
    if ModelFeature.GATED_DELTA in features(model):
        yield "The gated delta rule needs the package flash-linear-attention."


def sections(
    model: ModelSpec, goal: TrainGoal, decision: TrainDecision, *, on_processors: bool = False
) -> Sections:
    """Return what the plan decides, by section and field."""
    pipeline = decision.pipeline_model_parallel_size
    copies = decision.num_state_copies if decision.zero_stage else decision.data_parallel_size
    data = decision.data_parallel_size
    # A pipeline takes all micro-batches of a step at once; without one they are accumulated.
    local = goal.global_batch_size // data if pipeline > 1 else decision.micro_batch_size
    single = goal.precision is Precision.FP32
    tune = goal.adapters
    config: Sections = {
        "training": {
            "local_batch_size": local,
            "global_batch_size": goal.global_batch_size,
            "seq_len": goal.sequence_length,
            # Of frozen weights and adapters alike; the optimizer updates this type.
            "dtype": "bfloat16" if tune and tune.dtype == "bf16" else "float32",
            "mixed_precision_param": "float32" if single else "bfloat16",
            "mixed_precision_reduce": "float32",
            "disable_cuda_graphs": decision.cuda_graph == "none",
        },
        "parallelism": {
            "data_parallel_replicate_degree": copies,
            "data_parallel_shard_degree": data // copies,
            "fsdp_reshard_after_forward": "always" if decision.zero_stage == 3 else "never",
            "tensor_parallel_degree": decision.tensor_model_parallel_size,
            "enable_sequence_parallel": decision.sequence_parallel,
            "context_parallel_degree": decision.context_parallel_size,
            "pipeline_parallel_degree": pipeline,
            "expert_parallel_degree": decision.expert_model_parallel_size,
            # The release's default, which FSDP2 of torch 2.13 does not take; the others use DTensor
            # for all axes, or for none of the data axes.
            "spmd_backend": "partial_dtensor" if on_processors else "spmd_types",
        },
        "activation_checkpoint": {"mode": _checkpointing(model, decision)},
    }
    if pipeline > 1:
        config["parallelism"] |= {
            "pipeline_parallel_schedule": _schedule(decision),
            "pipeline_parallel_microbatch_size": decision.micro_batch_size,
            "module_fqns_per_model_part": _modules(model, decision),
        }
    attention = "sdpa" if on_processors else _attention(model, decision)
    config["model"] = {"attn_backend": attention}
    if shipped := _shipped_model(model):
        config["model"] |= dict(zip(("module", "config", "flavor"), shipped, strict=True))
    if model.num_moe_layers:
        config["model"]["moe_comm_backend"] = _DISPATCHERS[decision.dispatcher]
    if tune is not None:
        config["lora"] = dict(lora_fields(tune, model))
    return config


def _checkpoints(schedule: CheckpointSchedule | None, *, from_pinned: bool) -> Sections:
    if schedule is None:
        return {}
    mode = "async" if schedule.is_asynchronous else "disabled"
    mode = "async_with_pinned_mem" if from_pinned else mode
    return {
        "checkpoint": {
            "interval": schedule.steps,
            "async_mode": mode,
            "keep_latest_k": KEPT,
        }
    }


def _attention(model: ModelSpec, decision: TrainDecision) -> str:
    """Return the release's default backend for the model; varlen has no context parallelism."""
    is_varlen = model.architecture in _VARLEN and decision.context_parallel_size == 1
    return "varlen" if is_varlen else "flex"


def _shipped_model(model: ModelSpec) -> tuple[str, str, str] | None:
    shipped = _MODELS.get((model.architecture, model.num_layers, model.hidden_size))
    if shipped and shipped[2] == "671B" and model.vocab_size != _DEEPSEEK_V3_VOCABULARY:
        return None
    return shipped


def _checkpointing(model: ModelSpec, decision: TrainDecision) -> str:
    level = global_recompute(model, decision)
    if level not in (Recompute.NONE, Recompute.FULL):
        raise ValueError(f"recompute {level} is not one of none, full")
    return level.value


def _schedule(decision: TrainDecision) -> str:
    if decision.schedule == "zero_bubble":
        return "InterleavedZeroBubble"
    return "Interleaved1F1B" if decision.virtual_pipeline_model_parallel_size > 1 else "1F1B"


def _modules(model: ModelSpec, decision: TrainDecision) -> list[list[str]]:
    """Return the names of torchtitan's modules on each stage, in execution order."""
    stages: list[list[str]] = []
    start = 0
    for count in decision.pipeline_layout:
        stages.append([f"layers.{layer}" for layer in range(start, start + count)])
        start += count
    shipped = _shipped_model(model)
    stages[0].insert(0, "tok_embeddings")
    if shipped and shipped[0] in _WITH_VISION:
        stages[0].insert(0, "vision_encoder")
    stages[-1] += ["norm", "lm_head"]
    return stages


def _toml(config: Sections) -> str:
    """Return the sections as TOML; JSON strings, numbers and lists are valid TOML."""
    return "\n".join(
        f"[{section}]\n"
        + "".join(
            f"{name} = {json.dumps(value, ensure_ascii=True)}\n" for name, value in values.items()
        )
        for section, values in config.items()
    )


_BUILD: Final = """\
import inspect
import os
import sys
import tomllib
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import torch
from torchtitan.distributed.activation_checkpoint import FullAC


def module_named(name):
    # As --module names one: a model of torchtitan's, or the user's own module.
    for place in (f"torchtitan.models.{name}.config_registry", f"{name}.config_registry", name):
        try:
            return import_module(place)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{place}.".startswith(f"{error.name}."):
                raise
    sys.exit(f"MODULE: no module is named {name}")


def plan():
    if not hasattr(torch.distributed, "set_timeout"):
        sys.exit(
            f"torch {torch.__version__} has no torch.distributed.set_timeout, which torchtitan 0.3"
            " calls after its first step: install a torch that has it (2.13.0 does not)"
        )
    written = tomllib.loads(Path(__file__).with_name("torchtitan.toml").read_text(encoding="utf-8"))
    model = written["model"]
    backends = {name: value for name, value in model.items() if name.endswith("_backend")}
    if os.environ.get("ATTENTION"):
        backends["attn_backend"] = os.environ["ATTENTION"]
    if os.environ.get("MODULE"):
        build = getattr(module_named(os.environ["MODULE"]), os.environ["CONFIG"])
        arguments = inspect.signature(build).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in arguments.values())
        taken = {name for name in backends if takes_all or name in arguments}
        for name in sorted(backends.keys() - taken):
            if os.environ.get("RANK", "0") == "0":
                print(f"CONFIG takes no {name}; the plan has {backends[name]}", file=sys.stderr)
        config = build(**{name: backends[name] for name in taken})
    else:
        package = f"torchtitan.models.{model['module']}"
        config = getattr(import_module(f"{package}.config_registry"), model["config"])()
        config.model_spec = import_module(package).model_registry(model["flavor"], **backends)
"""

_ADAPT: Final = """\
    from torchtitan.components.lora import LoRAConverter

    spec = config.model_spec
    spec.model = LoRAConverter.Config(**written["lora"]).build().convert(spec.model)
"""

_PLAN: Final = """\
    full = written["activation_checkpoint"]["mode"] == "full"
    return replace(
        config,
        training=replace(config.training, **written["training"]),
        parallelism=replace(config.parallelism, **written["parallelism"]),
        activation_checkpoint=FullAC.Config() if full else None,
        checkpoint=replace(config.checkpoint, **written.get("checkpoint", {})),
    )
"""

_NAMES_NEEDED: Final = """\
export MODULE="${MODULE:?must name your module, torchtitan ships no such model}"
export CONFIG="${CONFIG:?must name the function of MODULE that returns a configuration}"
"""

_START: Final = """\
export PYTHONPATH="$FILES${PYTHONPATH:+:$PYTHONPATH}"

SAVED=()
if [[ -n "${CHECKPOINTS:-}" ]]; then
  SAVED=(--checkpoint.enable --checkpoint.folder "$CHECKPOINTS")
fi

exec "${LAUNCHER[@]}" -m "${TRAIN_FILE:-torchtitan.train}" --module moetune_plan --config plan \
  ${SAVED[@]+"${SAVED[@]}"} "$@"
"""
