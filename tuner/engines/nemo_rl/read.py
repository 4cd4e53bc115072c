"""NeMo-RL's launches as `RlLaunch`: a YAML, with those that its `defaults` name, or the command.

Defaults are those of NeMo-RL 0.7.0 (examples/configs/grpo_math_1B.yaml), the root of its recipes.
`max_total_sequence_length` holds prompt and response together; `train_global_batch_size` counts
responses. A colocated trainer always leaves the devices to the engines (models/policy/workers,
`offload_before_refit`, `offload_after_refit`), which sleep at level 1 and keep their weights on the
host (models/generation/vllm/vllm_worker.py). The reference is a copy in host memory that takes the
actor's place for its pass.

Not covered: DTensor as trainer; generation by Megatron, SGLang or Dynamo; NeMo-Gym and several
turns; dynamic sampling; LoRA.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any, Final

from tuner.costs.rl.packing import PackingRule, TokenBudget
from tuner.costs.serve.engine import InstanceDegrees
from tuner.engines.reading.hydra import merged, override_values, resolved, yaml_values
from tuner.engines.reading.rl_launch import (
    RlLaunch,
    optional_number,
    share,
    token_budget,
    trainer_settings,
)
from tuner.engines.reading.sections import Sections
from tuner.engines.reading.shell_words import shell_text
from tuner.errors import SpecError
from tuner.prices.weight_sync import SyncPath
from tuner.simulate.rl.step import RlPlacement
from tuner.spec.files import shown_value

FRAMEWORK: Final = "NeMo-RL 0.7"
GIB: Final = 2.0**30
_COMMAND: Final = re.compile(r"\brun_(grpo|ppo)\w*\.py\b")
_TEXT: Final = re.compile(
    r"^(grpo|ppo):(?=[\s\S]*^policy:)|^policy:(?=[\s\S]*^\s+megatron_cfg:)", re.M
)
_MEGATRON: Final = "policy.megatron_cfg."
_ENGINE: Final = "policy.generation.vllm_cfg."
_KWARGS: Final = "policy.generation.vllm_kwargs."
_COLOCATED: Final = "policy.generation.colocated."
_DEEPEST: Final = 8
DEFAULTS: Final[Mapping[str, Any]] = {
    "grpo.num_prompts_per_step": 32,
    "grpo.num_generations_per_prompt": 16,
    "grpo.async_grpo.enabled": False,
    "grpo.async_grpo.max_trajectory_age_steps": 1,
    "loss_fn.reference_policy_kl_penalty": 0.01,
    "policy.train_global_batch_size": 512,
    "policy.train_micro_batch_size": 4,
    "policy.max_total_sequence_length": 512,
    "policy.precision": "bfloat16",
    "policy.sequence_packing.enabled": True,
    "policy.generation.backend": "vllm",
    f"{_MEGATRON}recompute_granularity": "full",
    f"{_MEGATRON}moe_token_dispatcher_type": "alltoall",
    f"{_MEGATRON}optimizer.use_distributed_optimizer": True,
    f"{_MEGATRON}optimizer.use_precision_aware_optimizer": True,
    f"{_MEGATRON}distributed_data_parallel_config.overlap_grad_reduce": True,
    f"{_MEGATRON}distributed_data_parallel_config.overlap_param_gather": True,
    f"{_ENGINE}tensor_parallel_size": 1,
    f"{_ENGINE}gpu_memory_utilization": 0.6,
    f"{_COLOCATED}enabled": True,
    "cluster.num_nodes": 1,
    "cluster.gpus_per_node": 1,
}
FLAGS: Final[Mapping[str, str]] = {
    "tensor-model-parallel-size": f"{_MEGATRON}tensor_model_parallel_size",
    "pipeline-model-parallel-size": f"{_MEGATRON}pipeline_model_parallel_size",
    "context-parallel-size": f"{_MEGATRON}context_parallel_size",
    "expert-model-parallel-size": f"{_MEGATRON}expert_model_parallel_size",
    "sequence-parallel": f"{_MEGATRON}sequence_parallel",
    "decoder-first-pipeline-num-layers": f"{_MEGATRON}num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": f"{_MEGATRON}num_layers_in_last_pipeline_stage",
    "moe-token-dispatcher-type": f"{_MEGATRON}moe_token_dispatcher_type",
    "moe-enable-deepep": f"{_MEGATRON}moe_enable_deepep",
    "use-distributed-optimizer": f"{_MEGATRON}optimizer.use_distributed_optimizer",
    "use-precision-aware-optimizer": f"{_MEGATRON}optimizer.use_precision_aware_optimizer",
    "optimizer-cpu-offload": f"{_MEGATRON}optimizer.optimizer_cpu_offload",
    "optimizer-offload-fraction": f"{_MEGATRON}optimizer.optimizer_offload_fraction",
    "overlap-grad-reduce": f"{_MEGATRON}distributed_data_parallel_config.overlap_grad_reduce",
    "overlap-param-gather": f"{_MEGATRON}distributed_data_parallel_config.overlap_param_gather",
}
SPELLED: Final[Mapping[str, str]] = {
    "prompts": "grpo.num_prompts_per_step",
    "samples": "grpo.num_generations_per_prompt",
    "samples_per_update": "policy.train_global_batch_size",
    "longest_response": "policy.max_total_sequence_length",
    "max_model_len": f"{_ENGINE}max_model_len",
    "memory_ratio": f"{_ENGINE}gpu_memory_utilization",
    "most_running": f"{_KWARGS}max_num_seqs",
    "degrees": f"{_ENGINE}tensor_parallel_size",
    "is_eager": f"{_ENGINE}enforce_eager",
    "train_budget": "policy.sequence_packing.train_mb_tokens",
    "forward_budget": "policy.sequence_packing.logprob_mb_tokens",
    "recomputes_old": "loss_fn.force_on_policy_ratio",
    "versions": "grpo.async_grpo.max_trajectory_age_steps",
}
TRAINER_SPELLED: Final[Mapping[str, str]] = {
    "tensor": FLAGS["tensor-model-parallel-size"],
    "pipeline": FLAGS["pipeline-model-parallel-size"],
    "context": FLAGS["context-parallel-size"],
    "expert": FLAGS["expert-model-parallel-size"],
    "first_stage_layers": FLAGS["decoder-first-pipeline-num-layers"],
    "last_stage_layers": FLAGS["decoder-last-pipeline-num-layers"],
    "recompute": f"{_MEGATRON}activation_checkpointing",
}
STEP_TOKENS: Final = 16_384
"""`max_num_batched_tokens` that vLLM's engine class has by default on Hopper."""
MOST_RUNNING: Final = 256
BUCKET_BYTES: Final = 2.0 * GIB

Beside = Callable[[str], str | None]


def recognises(text: str) -> bool:
    """Return whether a text starts NeMo-RL, or is its configuration."""
    return (_COMMAND.search(text) or _TEXT.search(text)) is not None


def read(text: str, *, source: str, beside: Beside) -> RlLaunch:
    """Read a launch.

    Raises:
        SpecError: a setting cannot be read, or is not covered.
    """
    values, notes = _values(text, source, beside)
    is_ppo = "ppo" in values
    if is_ppo:
        values = {**values, "grpo": merged(values.get("grpo") or {}, values["ppo"] or {})}
    sections = Sections(resolved(values, DEFAULTS), source=source, defaults=DEFAULTS)
    _check_covered(sections, is_ppo=is_ppo, has_values="value" in values)
    is_colocated = sections.is_on(f"{_COLOCATED}enabled", default=True)
    is_late = sections.is_on("grpo.async_grpo.enabled")
    if is_late and is_colocated:
        raise SpecError(
            f"{source}: grpo.async_grpo needs devices of its own for generation; set"
            f" {_COLOCATED}enabled false, with {_COLOCATED}resources"
        )
    per_node = sections.number("cluster.gpus_per_node", default=1)
    devices = sections.number("cluster.num_nodes", default=1) * per_node
    rollout = devices if is_colocated else _rollout_devices(sections, devices, per_node)
    longest = sections.number("policy.max_total_sequence_length", default=512)
    update = sections.number("policy.train_global_batch_size", default=512)
    micro = sections.number("policy.train_micro_batch_size", default=4)
    forward = sections.number("policy.logprob_batch_size", default=micro)
    trainer = trainer_settings(
        sections,
        FLAGS,
        more={
            "bf16": (),
            "micro-batch-size": ("1",),
            "global-batch-size": (str(update),),
            "seq-length": (str(longest),),
            **_recompute(sections),
            **_precision(sections),
            "expert-tensor-parallel-size": (
                str(sections.number(f"{_MEGATRON}expert_tensor_parallel_size", default=1)),
            ),
        },
        spelled=TRAINER_SPELLED,
    )
    tensor = sections.number(f"{_ENGINE}tensor_parallel_size", default=1)
    expert = sections.number(f"{_ENGINE}expert_parallel_size", default=1)
    penalty = sections.value("loss_fn.reference_policy_kl_penalty")
    return RlLaunch(
        source=source,
        framework=FRAMEWORK,
        trainer=trainer.model_copy(
            update={
                "devices": devices if is_colocated else devices - rollout,
                "devices_per_node": per_node,
            }
        ),
        placement=RlPlacement.COLOCATED if is_colocated else RlPlacement.DISAGGREGATED,
        versions=float(sections.number("grpo.async_grpo.max_trajectory_age_steps", default=1))
        if is_late
        else 0.0,
        devices_per_node=per_node,
        rollout_devices=rollout,
        prompts=sections.number("grpo.num_prompts_per_step", default=32),
        samples=sections.number("grpo.num_generations_per_prompt", default=16),
        samples_per_update=update,
        epochs=sections.number("grpo.ppo_epochs", default=1),
        longest_prompt=0,
        longest_response=longest,
        max_model_len=optional_number(sections, f"{_ENGINE}max_model_len"),
        train_budget=_budget(sections, "train_mb_tokens", longest=longest, sequences=micro),
        forward_budget=_budget(sections, "logprob_mb_tokens", longest=longest, sequences=forward),
        recomputes_old=not sections.is_on("loss_fn.force_on_policy_ratio"),
        has_reference=bool(penalty),
        has_critic=is_ppo,
        engine=sections.word("policy.generation.backend", default="vllm"),
        degrees=InstanceDegrees(
            attention_tensor=tensor,
            attention_data=max(expert // tensor, 1),
            moe_tensor=1 if expert > 1 else tensor,
            expert=max(expert, tensor) if expert > 1 else 1,
            pipeline=sections.number(f"{_ENGINE}pipeline_parallel_size", default=1),
        ),
        memory_ratio=share(sections, f"{_ENGINE}gpu_memory_utilization"),
        most_running=sections.number(f"{_KWARGS}max_num_seqs", default=MOST_RUNNING),
        step_tokens=sections.number(f"{_KWARGS}max_num_batched_tokens", default=STEP_TOKENS),
        is_eager=sections.is_on(f"{_ENGINE}enforce_eager"),
        sleeps=True,
        sleep_keeps_weights=is_colocated,
        path=SyncPath.PACKED,
        bucket_bytes=BUCKET_BYTES,
        offloads_weights=is_colocated,
        offloads_optimizer=is_colocated,
        offloads_reference=True,
        spelled=SPELLED,
        ignored=sections.left,
        notes=notes,
    )


def _values(text: str, source: str, beside: Beside) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings of a YAML with its defaults, or of a command with its overrides."""
    values = yaml_values(text)
    if values is not None and ("policy" in values or "defaults" in values):
        return _with_defaults(values, PurePosixPath(), beside)
    over: dict[str, Any] = {}
    named = None
    for command in shell_text(text, source=source, beside=beside).commands:
        words = command.words
        if not any(_COMMAND.search(word) for word in words):
            continue
        over = merged(over, override_values(words)[0])
        for word, following in zip(words, (*words[1:], ""), strict=True):
            if word.split("=")[0] == "--config":
                named = word.partition("=")[2] or following
    if named is None:
        if not over:
            raise SpecError(f"{source}: no run of NeMo-RL with --config, and no YAML of it")
        return over, ("no --config: examples/configs/grpo_math_1B.yaml counts",)
    stated = beside(named)
    config = None if stated is None else yaml_values(stated)
    if config is None:
        raise SpecError(
            f"{source}: --config {shown_value(named)} is not beside it, or no YAML; name the YAML"
            " itself as --launch"
        )
    config, notes = _with_defaults(config, PurePosixPath(named).parent, beside)
    return merged(config, over), notes


def _with_defaults(
    values: dict[str, Any], folder: PurePosixPath, beside: Beside, *, depth: int = 0
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return settings over those of the files that they are based on."""
    named = values.pop("defaults", None)
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    base: dict[str, Any] = {}
    notes: tuple[str, ...] = ()
    for name in names if depth < _DEEPEST else ():
        path = folder / str(name)
        text = beside(str(path))
        below = None if text is None else yaml_values(text)
        if below is None:
            notes += (f"{path} is not beside it: the defaults of {FRAMEWORK} count for it",)
            continue
        below, more = _with_defaults(below, path.parent, beside, depth=depth + 1)
        base, notes = merged(base, below), notes + more
    return merged(base, values), notes


def _check_covered(sections: Sections, *, is_ppo: bool, has_values: bool) -> None:
    """Refuse what is not covered.

    Raises:
        SpecError: the launch has it.
    """
    source = sections.source
    if is_ppo and not has_values:
        raise SpecError(f"{source}: ppo without critic (no section 'value'); add it, or use grpo")
    if not sections.is_on(f"{_MEGATRON}enabled"):
        raise SpecError(
            f"{source}: policy.dtensor_cfg: trainers other than megatron are not covered; give a"
            f" launch with {_MEGATRON}enabled true"
        )
    backend = sections.word("policy.generation.backend", default="vllm")
    if backend != "vllm":
        raise SpecError(
            f"{source}: policy.generation.backend {shown_value(backend)} is not covered; vllm is"
        )
    if sections.is_on("grpo.use_dynamic_sampling"):
        raise SpecError(
            f"{source}: grpo.use_dynamic_sampling: how many groups are discarded is not known;"
            " set it false"
        )


def _rollout_devices(sections: Sections, devices: int, per_node: int) -> int:
    """Return the devices that generation has for itself.

    Raises:
        SpecError: it has none, or leaves the trainer none.
    """
    nodes = sections.value(f"{_COLOCATED}resources.num_nodes")
    per_engine_node = sections.number(f"{_COLOCATED}resources.gpus_per_node", default=per_node)
    rollout = per_engine_node * (nodes if isinstance(nodes, int) else 1)
    if not 0 < rollout < devices:
        raise SpecError(
            f"{sections.source}: {_COLOCATED}resources: {rollout} of {devices} devices generate;"
            " leave at least one to training"
        )
    return rollout


def _recompute(sections: Sections) -> dict[str, tuple[str, ...]]:
    if not sections.is_on(f"{_MEGATRON}activation_checkpointing"):
        return {}
    granularity = sections.word(f"{_MEGATRON}recompute_granularity", default="full")
    flags: dict[str, tuple[str, ...]] = {"recompute-granularity": (granularity,)}
    if granularity == "full":
        return flags | {"recompute-method": ("uniform",), "recompute-num-layers": ("1",)}
    modules = sections.value(f"{_MEGATRON}recompute_modules") or ["core_attn"]
    return flags | {"recompute-modules": tuple(map(str, modules))}


def _precision(sections: Sections) -> dict[str, tuple[str, ...]]:
    flags: dict[str, tuple[str, ...]] = {}
    if not sections.is_on(f"{_MEGATRON}distributed_data_parallel_config.grad_reduce_in_fp32"):
        flags["grad-reduce-in-bf16"] = ()
    if sections.is_on(f"{_MEGATRON}fp8_cfg.enabled"):
        recipe = sections.word(f"{_MEGATRON}fp8_cfg.fp8_recipe", default="blockwise")
        flags |= {"fp8-format": ("e4m3",), "fp8-recipe": (recipe,)}
    return flags


def _budget(sections: Sections, name: str, *, longest: int, sequences: int) -> TokenBudget:
    packing = sections.is_on("policy.sequence_packing.enabled", default=True)
    dynamic = sections.is_on("policy.dynamic_batching.enabled")
    section = "dynamic_batching" if dynamic and not packing else "sequence_packing"
    return token_budget(
        is_packed=packing or dynamic,
        tokens=sections.number(f"policy.{section}.{name}", default=longest * sequences),
        sequences=sequences,
        rule=PackingRule.FIRST_FIT if packing else PackingRule.BALANCED,
        said=f"policy.{section}.{name}",
    )
