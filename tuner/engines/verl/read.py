"""verl's launches as `RlLaunch`: a script's Hydra overrides of `main_ppo`, or its configuration.

Defaults are those of verl 0.9.0 (trainer/config/_generated_ppo_megatron_trainer.yaml). Micro-batch
budgets are of one data-parallel rank's devices: tokens times the context ranks
(workers/engine/megatron/transformer_impl.py); batches are in prompts. An engine sleeps at level 2,
which drops its weights (workers/rollout/vllm_rollout/vllm_async_server.py), and offloaded weights
and reference are copies in pinned memory, gradients are freed (utils/megatron_utils.py).

Not covered: FSDP, VeOmni and torchtitan as trainers; colocate_async, fully asynchronous and
one-step-off programs; reward models; LoRA; several turns.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from tuner.costs.rl.packing import PackingRule
from tuner.costs.serve.engine import InstanceDegrees
from tuner.engines.megatron_lm import flags as table
from tuner.engines.reading.hydra import merged, override_values, resolved, value_at, yaml_values
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

FRAMEWORK: Final = "verl 0.9"
MIB: Final = 2.0**20
_MARK: Final = re.compile(r"\bmain_ppo\b|\bactor_rollout_ref\b")
_ACTOR: Final = "actor_rollout_ref.actor."
_MEGATRON: Final = f"{_ACTOR}megatron."
_LAYERS: Final = f"{_MEGATRON}override_transformer_config."
_OPTIMIZER: Final = f"{_ACTOR}optim.override_optimizer_config."
_ROLLOUT: Final = "actor_rollout_ref.rollout."
_OFF_POLICY: Final = "trainer.v1.separate_async."
DEFAULTS: Final[Mapping[str, Any]] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "trainer.v1.trainer_mode": "sync",
    f"{_OFF_POLICY}num_warmup_batches": 1,
    f"{_OFF_POLICY}parameter_sync_step": 4,
    f"{_ACTOR}ppo_mini_batch_size": 256,
    f"{_ACTOR}ppo_epochs": 1,
    f"{_ACTOR}use_dynamic_bsz": False,
    f"{_ACTOR}ppo_max_token_len_per_gpu": 16384,
    f"{_MEGATRON}sequence_parallel": True,
    f"{_MEGATRON}use_distributed_optimizer": True,
    f"{_ROLLOUT}n": 1,
    f"{_ROLLOUT}nnodes": 0,
    f"{_ROLLOUT}tensor_model_parallel_size": 2,
    f"{_ROLLOUT}gpu_memory_utilization": 0.5,
    f"{_ROLLOUT}max_num_seqs": 256,
    f"{_ROLLOUT}max_num_batched_tokens": 8192,
    f"{_ROLLOUT}checkpoint_engine.backend": "naive",
    f"{_ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes": 2048,
}
FLAGS: Final[Mapping[str, str]] = {
    "tensor-model-parallel-size": f"{_MEGATRON}tensor_model_parallel_size",
    "pipeline-model-parallel-size": f"{_MEGATRON}pipeline_model_parallel_size",
    "num-virtual-stages-per-pipeline-rank": f"{_MEGATRON}virtual_pipeline_model_parallel_size",
    "context-parallel-size": f"{_MEGATRON}context_parallel_size",
    "expert-model-parallel-size": f"{_MEGATRON}expert_model_parallel_size",
    "expert-tensor-parallel-size": f"{_MEGATRON}expert_tensor_parallel_size",
    "sequence-parallel": f"{_MEGATRON}sequence_parallel",
    "use-distributed-optimizer": f"{_MEGATRON}use_distributed_optimizer",
    "decoder-first-pipeline-num-layers": f"{_LAYERS}num_layers_in_first_pipeline_stage",
    "decoder-last-pipeline-num-layers": f"{_LAYERS}num_layers_in_last_pipeline_stage",
    "optimizer-cpu-offload": f"{_OPTIMIZER}optimizer_cpu_offload",
    "optimizer-offload-fraction": f"{_OPTIMIZER}optimizer_offload_fraction",
    "use-precision-aware-optimizer": f"{_OPTIMIZER}use_precision_aware_optimizer",
}
"""Setting by Megatron-LM's flag; further ones of the model are overrides of the same name."""
SPELLED: Final[Mapping[str, str]] = {
    "prompts": "data.train_batch_size",
    "samples": f"{_ROLLOUT}n",
    "samples_per_update": f"{_ACTOR}ppo_mini_batch_size * rollout.n",
    "longest_prompt": "data.max_prompt_length",
    "longest_response": "data.max_response_length",
    "max_model_len": f"{_ROLLOUT}max_model_len",
    "memory_ratio": f"{_ROLLOUT}gpu_memory_utilization",
    "most_running": f"{_ROLLOUT}max_num_seqs",
    "degrees": f"{_ROLLOUT}tensor_model_parallel_size",
    "is_eager": f"{_ROLLOUT}enforce_eager",
    "train_budget": f"{_ACTOR}ppo_max_token_len_per_gpu",
    "forward_budget": f"{_ROLLOUT}log_prob_max_token_len_per_gpu",
    "offloads_weights": f"{_MEGATRON}param_offload",
    "offloads_optimizer": f"{_MEGATRON}optimizer_offload",
    "recomputes_old": "algorithm.rollout_correction.bypass_mode",
    "path": f"{_ROLLOUT}checkpoint_engine.backend",
}
TRAINER_SPELLED: Final[Mapping[str, str]] = {
    "tensor": FLAGS["tensor-model-parallel-size"],
    "pipeline": FLAGS["pipeline-model-parallel-size"],
    "context": FLAGS["context-parallel-size"],
    "expert": FLAGS["expert-model-parallel-size"],
    "expert_tensor": FLAGS["expert-tensor-parallel-size"],
    "virtual_pipeline": FLAGS["num-virtual-stages-per-pipeline-rank"],
    "first_stage_layers": FLAGS["decoder-first-pipeline-num-layers"],
    "last_stage_layers": FLAGS["decoder-last-pipeline-num-layers"],
    "recompute": f"{_LAYERS}recompute_granularity",
}
_PATHS: Final[Mapping[str, SyncPath]] = {
    "naive": SyncPath.BUCKETED,
    "nccl": SyncPath.BUCKETED,
    "delta_sharded": SyncPath.DELTA,
    "nixl": SyncPath.CHECKPOINT_ENGINE,
    "mooncake": SyncPath.CHECKPOINT_ENGINE,
    "kimi_ckpt_engine": SyncPath.CHECKPOINT_ENGINE,
}
"""Ways of weights by `checkpoint_engine.backend`."""

Beside = Callable[[str], str | None]


def recognises(text: str) -> bool:
    """Return whether a text starts verl, or is its configuration."""
    return _MARK.search(text) is not None


def read(text: str, *, source: str, beside: Beside) -> RlLaunch:
    """Read a launch.

    Raises:
        SpecError: a setting cannot be read, or is not covered.
    """
    values, notes = _values(text, source, beside)
    sections = Sections(resolved(values, DEFAULTS), source=source, defaults=DEFAULTS)
    _check_covered(sections, values)
    mode = sections.word("trainer.v1.trainer_mode", default="sync")
    is_split = mode == "separate_async"
    per_node = sections.number("trainer.n_gpus_per_node", default=8)
    devices = sections.number("trainer.nnodes", default=1) * per_node
    samples = sections.number(f"{_ROLLOUT}n", default=1)
    context = sections.number(f"{_MEGATRON}context_parallel_size", default=1)
    dynamic = sections.is_on(f"{_ACTOR}use_dynamic_bsz")
    update = sections.number(f"{_ACTOR}ppo_mini_batch_size", default=256) * samples
    tokens = sections.number(f"{_ACTOR}ppo_max_token_len_per_gpu", default=16384)
    prompt = sections.number("data.max_prompt_length", default=512)
    response = sections.number("data.max_response_length", default=512)
    backend = sections.word(
        f"{_ROLLOUT}checkpoint_engine.backend", default="naive", choices=tuple(_PATHS)
    )
    if is_split:
        _check_split(sections, backend)
    bucket = sections.number(
        f"{_ROLLOUT}checkpoint_engine.update_weights_bucket_megabytes", default=2048
    )
    trainer = trainer_settings(
        sections,
        {**FLAGS, **_further_flags(values)},
        more={
            "bf16": (),
            "micro-batch-size": ("1",),
            "global-batch-size": (str(update),),
            "seq-length": (str(prompt + response),),
            "moe-token-dispatcher-type": ("alltoall",),
        },
        spelled=TRAINER_SPELLED,
    )
    return RlLaunch(
        source=source,
        framework=FRAMEWORK,
        trainer=trainer.model_copy(update={"devices": devices, "devices_per_node": per_node}),
        placement=RlPlacement.DISAGGREGATED if is_split else RlPlacement.COLOCATED,
        versions=float(sections.number(f"{_OFF_POLICY}num_warmup_batches", default=1, least=0))
        if is_split
        else 0.0,
        devices_per_node=per_node,
        rollout_devices=sections.number(f"{_ROLLOUT}nnodes", default=0, least=0)
        * sections.number(f"{_ROLLOUT}n_gpus_per_node", default=per_node)
        if is_split
        else devices,
        prompts=sections.number("data.train_batch_size", default=1024),
        samples=samples,
        samples_per_update=update,
        epochs=sections.number(f"{_ACTOR}ppo_epochs", default=1),
        longest_prompt=prompt,
        longest_response=response,
        max_model_len=optional_number(sections, f"{_ROLLOUT}max_model_len"),
        train_budget=token_budget(
            is_packed=dynamic,
            tokens=tokens * context,
            sequences=optional_number(sections, f"{_ACTOR}ppo_micro_batch_size_per_gpu"),
            rule=PackingRule.BALANCED,
            said=f"{source}: {_ACTOR}ppo_micro_batch_size_per_gpu",
        ),
        forward_budget=token_budget(
            is_packed=sections.is_on(f"{_ROLLOUT}log_prob_use_dynamic_bsz", default=dynamic),
            tokens=context
            * sections.number(f"{_ROLLOUT}log_prob_max_token_len_per_gpu", default=tokens),
            sequences=optional_number(sections, f"{_ROLLOUT}log_prob_micro_batch_size_per_gpu"),
            rule=PackingRule.BALANCED,
            said=f"{source}: {_ROLLOUT}log_prob_micro_batch_size_per_gpu",
        ),
        recomputes_old=not sections.is_on("algorithm.rollout_correction.bypass_mode"),
        has_reference=sections.is_on(f"{_ACTOR}use_kl_loss")
        or sections.is_on("algorithm.use_kl_in_reward"),
        has_critic=_has_critic(sections),
        engine=sections.word(
            f"{_ROLLOUT}name", default="vllm", choices=("vllm", "sglang", "trtllm")
        ),
        degrees=_engine_degrees(sections),
        memory_ratio=share(sections, f"{_ROLLOUT}gpu_memory_utilization"),
        most_running=sections.number(f"{_ROLLOUT}max_num_seqs", default=256),
        step_tokens=sections.number(f"{_ROLLOUT}max_num_batched_tokens", default=8192),
        is_eager=sections.is_on(f"{_ROLLOUT}enforce_eager"),
        sleeps=sections.is_on(f"{_ROLLOUT}free_cache_engine", default=True),
        sleep_keeps_weights=False,
        path=_PATHS[backend],
        bucket_bytes=bucket * MIB,
        offloads_weights=sections.is_on(f"{_MEGATRON}param_offload"),
        offloads_optimizer=sections.is_on(f"{_MEGATRON}optimizer_offload"),
        offloads_reference=sections.is_on(
            "actor_rollout_ref.ref.megatron.param_offload",
            default=sections.is_on(f"{_MEGATRON}param_offload"),
        ),
        spelled=SPELLED,
        ignored=sections.left,
        notes=notes,
    )


def _values(text: str, source: str, beside: Beside) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the settings of a configuration, or of a command's overrides."""
    values = yaml_values(text)
    if values is not None and "actor_rollout_ref" in values:
        return values, ()
    shell = shell_text(text, source=source, beside=beside)
    values = {}
    unknown: list[str] = []
    for command in shell.commands:
        if any(_MARK.search(word) for word in command.words):
            more, lacking = override_values(command.words)
            values = merged(values, more)
            unknown.extend(lacking)
    if not values:
        raise SpecError(
            f"{source}: no override of verl's main_ppo, such as data.train_batch_size=8"
        )
    notes = [f"not read, because the text does not set it: {name}" for name in unknown[:20]]
    notes += [f"not run, so not known: {words[:120]}" for words in shell.skipped[:5]]
    return values, tuple(notes)


def _check_covered(sections: Sections, values: Mapping[str, Any]) -> None:
    """Refuse trainers and modes that are not covered.

    Raises:
        SpecError: the launch has one.
    """
    strategy = sections.value(f"{_ACTOR}strategy")
    engine = sections.value("model_engine") or strategy
    has_layout = isinstance(value_at(values, _MEGATRON.rstrip(".")), dict)
    if engine != "megatron" and not (engine is None and has_layout):
        raise SpecError(
            f"{sections.source}: {_ACTOR}strategy {engine or 'fsdp'}: trainers other than megatron"
            " are not covered; give a launch with model_engine=megatron"
        )
    mode = sections.word("trainer.v1.trainer_mode", default="sync")
    if mode not in ("sync", "separate_async"):
        raise SpecError(
            f"{sections.source}: trainer.v1.trainer_mode {mode[:40]} is not covered; sync and"
            " separate_async are"
        )
    if sections.is_on(f"{_ROLLOUT}multi_turn.enable"):
        raise SpecError(
            f"{sections.source}: {_ROLLOUT}multi_turn: seconds of tools are not known; set it false"
        )


def _check_split(sections: Sections, backend: str) -> None:
    """Refuse what verl's separate_async does.

    Raises:
        SpecError: the batch or the way of the weights is none of it.
    """
    said = f"{sections.source}: trainer.v1.trainer_mode separate_async"
    if backend == "naive":
        raise SpecError(f"{said} has no naive checkpoint_engine.backend; name nccl")
    prompts = sections.number("data.train_batch_size", default=1024)
    mini = sections.number(f"{_ACTOR}ppo_mini_batch_size", default=256)
    syncs = sections.number(f"{_OFF_POLICY}parameter_sync_step", default=4)
    if prompts != syncs * mini:
        raise SpecError(
            f"{said}: data.train_batch_size {prompts} is not parameter_sync_step {syncs} *"
            f" ppo_mini_batch_size {mini}; write {syncs * mini}"
        )


def _has_critic(sections: Sections) -> bool:
    """Return whether a critic is trained, as verl decides.

    Raises:
        SpecError: the advantage needs one that is switched off.
    """
    is_gae = sections.word("algorithm.adv_estimator", default="gae") == "gae"
    stated = sections.value("critic.enable")
    if is_gae and stated is False:
        raise SpecError(
            f"{sections.source}: PPO (algorithm.adv_estimator=gae) without critic"
            " (critic.enable=False); enable it, or choose grpo"
        )
    return is_gae if stated is None else bool(stated)


def _engine_degrees(sections: Sections) -> InstanceDegrees:
    tensor = sections.number(f"{_ROLLOUT}tensor_model_parallel_size", default=2)
    data = sections.number(f"{_ROLLOUT}data_parallel_size", default=1)
    expert = sections.number(f"{_ROLLOUT}expert_parallel_size", default=1)
    if expert == 1:
        return InstanceDegrees(
            attention_tensor=tensor, attention_data=data, moe_tensor=tensor * data
        )
    # The number of ranks is what counts: engines take TP * DP whatever is stated.
    return InstanceDegrees(attention_tensor=tensor, attention_data=data, expert=tensor * data)


def _further_flags(values: Mapping[str, Any]) -> dict[str, str]:
    """Return overrides of the model that are Megatron-LM's flags by their name."""
    stated = value_at(values, _LAYERS.rstrip("."))
    names = stated if isinstance(stated, dict) else {}
    flags = {str(name).replace("_", "-"): f"{_LAYERS}{name}" for name in names}
    return {flag: name for flag, name in flags.items() if flag in table.KNOWN}
