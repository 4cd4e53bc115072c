"""Megatron-LM's arguments, from a script, a command or YAML, as `LaunchSettings`.

Defaults are the engine's own (core_v0.16.1 to core_v0.19.0): dispatcher allgather, dropout 0.1,
expert tensor parallelism as the dense layers', recompute modules `core_attn`, main gradients in
fp32 unless `--grad-reduce-in-bf16` or a precision-aware optimizer says bf16.

YAML is read in three shapes: a mapping of flags (`--tensor-model-parallel-size: 8`, also below
`MODEL_ARGS`), the same with plain keys, and Megatron-Bridge's sections (`model:`, `train:`, ...),
whose field names are the flags' with `_`.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, Literal

from profilers.steps.config import Recompute
from tuner.catalog.manifest import DEFAULT_RANK_ORDER, PIPELINE_INSIDE_ORDER
from tuner.engines.megatron_lm import flags as table
from tuner.engines.megatron_lm import primus
from tuner.engines.megatron_lm.optimizer_state import keeps_remainders, optimizer_state
from tuner.engines.megatron_lm.unpriced import balance, differing_settings, unpriced_settings
from tuner.engines.reading.arguments import OFF, ON, UNSET, Flags, training_flags
from tuner.engines.reading.hybrid_pattern import HybridPattern, hybrid_pattern
from tuner.engines.reading.launch import (
    Graphs,
    LaunchSettings,
    StatedSize,
    TokenDispatcher,
    TrainingEngine,
)
from tuner.engines.reading.layer_pattern import layer_pattern, linear_pattern
from tuner.engines.reading.mistakes import read_flags
from tuner.engines.reading.pipeline_layout import pipeline_layout
from tuner.engines.reading.sections import MOST_SEARCHED, SLIP_RATIO
from tuner.engines.reading.variables import defaults_note, read_variables, with_defaults
from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.yaml_text import parse_yaml

RECOMPUTE_MODULES: Final = (
    "core_attn",
    "moe_act",
    "layernorm",
    "mla_up_proj",
    "mlp",
    "moe",
    "shared_experts",
)
_SHARDING: Final[Mapping[str, Literal[0, 1, 2, 3]]] = {
    "no_shard": 0,
    "optim": 1,
    "optim_grads": 2,
    "optim_grads_params": 3,
}
LOGIT_BYTES: Final = {"native": 10.0, "te": 2.0}
"""Bytes of the fused cross entropy: gradients over the logits (te); fp32 probabilities, a copy of
them whose targets are changed and gradients in bf16, as torch.compile writes `calculate_gradients`
(native, megatron/core/fusions/fused_cross_entropy.py of core 0.16.1, compiled by torch 2.13)."""
UNFUSED_LOGIT_BYTES: Final = 6.0
"""fp32 probabilities that become the gradients, and gradients in bf16."""
_DEEPEST: Final = 6
_NOTHING: Final = ("", "null", "None", "~")
"""Defaults of variables that leave a setting out."""
_VARIANT: Final = "--experimental-attention-variant"
_VARIANTS: Final = ("gated_delta_net", "dsa", "dsv4_hybrid")
"""Values of that flag in core_v0.19.0; the last is the dev branch's, DeepSeek-V4's."""
_SECTIONS: Final = ("model", "train", "ddp", "optimizer")


def read(
    text: str,
    *,
    source: str,
    environment: Mapping[str, str] | None = None,
    beside: Callable[[str], str | None] = lambda _: None,
) -> LaunchSettings:
    """Read a script, a pasted command or a list of arguments.

    Args:
        text: the script, command or arguments.
        source: what messages call it.
        environment: variables that are set when the script starts.
        beside: the text of a file that the script reads.

    Raises:
        SpecError: one line: what cannot be read, and what to write instead.
    """
    is_primus = primus.COMMAND.search(text) is not None
    flags = training_flags(
        text,
        source=source,
        known=table.KNOWN | {"config"} if is_primus else table.KNOWN,
        switches=table.SWITCHES,
        environment=environment,
        beside=beside,
    )
    if is_primus:
        # Sizes that the command leaves to Primus' file of the model are the spec's.
        settings = settings_of(replace(flags, values=_primus_values(flags, beside)))
        return settings.model_copy(update={"stated": ()})
    return settings_of(flags)


def _primus_values(flags: Flags, beside: Callable[[str], str | None]) -> dict[str, tuple[str, ...]]:
    """Return the flags of Primus' command over the file that it names, and over its defaults."""
    named = flags.word("config") or flags.environment.get("EXP", "")
    text = next(filter(None, map(beside, (named, named.rpartition("/")[2]))), None)
    if text is None:
        raise SpecError(
            f"{flags.source}: {shown_value(named)}, the file that Primus reads, is not beside the"
            " launch; estimate it where the file is"
        )
    raw = parse_yaml(text, source=named)
    overrides = primus.overrides(raw if isinstance(raw, dict) else {}, source=named) or {}
    given = {**dict(_leaves(overrides, {}, environment=flags.environment)), **flags.values}
    # A flag that is nothing takes back what the file says.
    return primus.with_defaults(
        {name: words for name, words in given.items() if not words or words[0] not in _NOTHING}
    )


def read_yaml(text: str, *, source: str) -> LaunchSettings:
    """Read YAML that holds flags, or Megatron-Bridge's sections.

    Raises:
        SpecError: not plain YAML, or nothing of Megatron-LM in it.
    """
    raw = parse_yaml(text, source=source)
    if not isinstance(raw, dict):
        raise SpecError(f"{source}: {shown_value(raw)} at the top, where flags belong")
    values: dict[str, tuple[str, ...]] = {}
    defaults: dict[str, str] = {}
    of_primus = primus.overrides(raw, source=source)
    for name, words in _leaves(raw if of_primus is None else of_primus, defaults):
        if name in values and values[name] != words:
            raise SpecError(f"{source}: {name} is given twice, with different values; keep one")
        values[name] = words
    if of_primus is not None:
        values = primus.with_defaults(values)
    if not table.KNOWN & set(values):
        raise SpecError(
            f"{source}: no setting of Megatron-LM, such as tensor_model_parallel_size, in it"
        )
    # Sections are overrides of a recipe of Megatron-Bridge.
    has_recipe = any(isinstance(raw.get(section), dict) for section in _SECTIONS)
    if has_recipe:
        values = over_recipe(values)
    notes = defaults_note(defaults)
    return settings_of(Flags(source=source, values=values, notes=notes), has_recipe=has_recipe)


def over_recipe(values: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return flags over what recipes of Megatron-Bridge set."""
    given = {table.ALIASES.get(name, name) for name in values}
    is_half = values.get("fp16", ("false",)) != ("false",)
    unsaid = {
        name: words
        for name, words in table.RECIPE.items()
        if name not in given and not (is_half and name == "bf16")
    }
    return {**unsaid, **values}


def _leaves(
    mapping: Mapping[str, Any],
    defaults: dict[str, str],
    *,
    environment: Mapping[str, str] = MappingProxyType({}),
    depth: int = 0,
) -> Iterator[tuple[str, tuple[str, ...]]]:
    for key, value in mapping.items():
        name = str(key).lstrip("-").replace("_", "-")
        if isinstance(value, dict):
            if depth < _DEEPEST:
                below = depth + 1
                yield from _leaves(value, defaults, environment=environment, depth=below)
        elif isinstance(value, list):
            yield name, tuple(_word(part) for part in value)
        elif isinstance(value, str):
            text = with_defaults(value, defaults, environment)
            if text == value or text not in _NOTHING:
                yield name, tuple(text.split())
        elif value is not None:
            yield name, (_word(value),)


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def settings_of(given: Flags, *, has_recipe: bool = False) -> LaunchSettings:
    """Turn flags into settings; settings that only a recipe has are priced as recipes set them.

    Raises:
        SpecError: a flag holds no value of its kind, or the engine no longer reads it.
    """
    return read_flags(given, lambda flags: _settings(flags, has_recipe=has_recipe))


def _settings(given: Flags, *, has_recipe: bool) -> LaunchSettings:
    flags = _renamed(given)
    tensor = flags.number("tensor-model-parallel-size") or 1
    pipeline = flags.number("pipeline-model-parallel-size") or 1
    micro_batch = flags.number("micro-batch-size")
    if micro_batch is None:
        raise SpecError(f"{flags.source}: --micro-batch-size is missing; Megatron-LM needs it")
    layout = flags.word("pipeline-model-parallel-layout")
    hybrid = _hybrid(flags)
    zero_stage = _zero_stage(flags)
    unread = sorted(set(flags.values) - table.UNDERSTOOD)
    _check_spelling(flags, unread)
    return LaunchSettings(
        engine=TrainingEngine.MEGATRON,
        source=flags.source,
        devices=flags.nodes * flags.devices_per_node
        if flags.nodes and flags.devices_per_node
        else None,
        devices_per_node=flags.devices_per_node,
        tensor=tensor,
        context=flags.number("context-parallel-size") or 1,
        pipeline=pipeline,
        expert=flags.number("expert-model-parallel-size") or 1,
        expert_tensor=flags.number("expert-tensor-parallel-size"),
        virtual_pipeline=flags.number("num-virtual-stages-per-pipeline-rank"),
        layers_per_virtual_stage=flags.number("num-layers-per-virtual-pipeline-stage"),
        interleave_group=flags.number(table.SPELLED["interleave_group"]),
        layout=pipeline_layout(layout, said=f"{flags.source}: --{table.SPELLED['layout']}")
        if layout is not None
        else (),
        letters=hybrid.stages if hybrid else (),
        mtp_letters=hybrid.mtp[0] if hybrid and hybrid.mtp else "",
        replicas=flags.number("num-distributed-optimizer-instances") or 1,
        rank_order=PIPELINE_INSIDE_ORDER
        if flags.is_on("use-tp-pp-dp-mapping")
        else DEFAULT_RANK_ORDER,
        environment=read_variables(flags.environment),
        first_stage_layers=flags.number("decoder-first-pipeline-num-layers"),
        last_stage_layers=flags.number("decoder-last-pipeline-num-layers"),
        embedding_as_layers=int(flags.is_on("account-for-embedding-in-pipeline-split")),
        loss_as_layers=int(flags.is_on("account-for-loss-in-pipeline-split")),
        sequence_parallel=flags.is_on("sequence-parallel"),
        sequence=flags.number("seq-length"),
        micro_batch=micro_batch,
        global_batch=flags.number("global-batch-size"),
        accumulation=None if "global-batch-size" in flags.values else 1,
        zero_stage=zero_stage,
        **_precision(flags),
        **optimizer_state(flags, has_recipe=has_recipe),
        **_experts(flags, has_recipe=has_recipe),
        logit_bytes=0.0 if has_recipe else _logit_bytes(flags),
        **_recompute(flags),
        chunks=flags.number("mlp-chunks-for-training") or 1,
        dispatcher=_dispatcher(flags),
        **_switches(flags, zero_stage),
        ddp_bucket_size=_bucket(flags),
        cuda_graph=_graphs(flags),
        flash_attention=_flash(flags),
        dropout=max(_dropout(flags, "hidden-dropout"), _dropout(flags, "attention-dropout")) > 0,
        optimizer_offload_ratio=_offload(flags),
        activation_offload_layers=flags.number("cpu-offloading-num-layers", least=0) or 0,
        activation_offload=flags.is_on("fine-grained-activation-offloading"),
        mtp_layers=_mtp_layers(flags, hybrid),
        save_interval=flags.number("save-interval"),
        saves_nowhere=not has_recipe and _saves_nowhere(flags),
        saves_in_background=flags.is_on("async-save")
        and not _waits_for_saves(flags, has_recipe=has_recipe),
        **_retention(flags),
        **_saves_to_hosts(flags),
        restarts_in_process=flags.is_on("inprocess-restart"),
        balance="the recipe" if has_recipe and not balance(flags) else balance(flags),
        differing_settings=dict(differing_settings(flags, has_recipe=has_recipe)),
        unpriced=tuple(unpriced_settings(flags)),
        stated=tuple(_stated(flags)),
        spelled={field: f"--{name}" for field, name in table.SPELLED.items()},
        understood=tuple(flags.said(name) for name in flags.values if name in table.UNDERSTOOD),
        ignored=tuple(shown_value(flags.said(name))[1:-1] for name in unread),
        deprecated=tuple(
            f"--{name}: say {table.DEPRECATED[name]}"
            for name in given.values
            if name in table.DEPRECATED
        ),
        notes=(*flags.notes, *_remarks(flags, has_recipe=has_recipe)),
    )


def _hybrid(flags: Flags) -> HybridPattern | None:
    word = flags.word("hybrid-layer-pattern")
    if word is None:
        return None
    return hybrid_pattern(word, said=f"{flags.source}: --hybrid-layer-pattern")


def _mtp_layers(flags: Flags, hybrid: HybridPattern | None) -> int:
    """Return the MTP layers, of which the engine believes the pattern where both say them."""
    if hybrid and hybrid.mtp:
        return len(hybrid.mtp)
    return flags.number("mtp-num-layers", least=0) or 0


def _check_spelling(flags: Flags, unread: Sequence[str]) -> None:
    """Refuse a misspelled flag, as the engine would, rather than ignore it."""
    for name in unread[:MOST_SEARCHED]:
        near = difflib.get_close_matches(name, table.UNDERSTOOD, n=1, cutoff=SLIP_RATIO)
        is_longer = bool(near) and name.startswith(f"{near[0]}-")
        if near and not is_longer and name not in (table.KNOWN | table.CONFUSABLE):
            raise SpecError(
                f"{flags.source}: --{shown_value(name)[1:-1]} is no flag of Megatron-LM; did you "
                f"mean --{near[0]}?"
            )


def _remarks(flags: Flags, *, has_recipe: bool) -> Iterator[str]:
    if keeps_remainders(flags):
        yield (
            "--use-precision-aware-optimizer keeps 16 of the 32 bits of master weights: the bf16"
            " parameters are the other half (store_param_remainders)"
        )
    if flags.word("moe-flex-dispatcher-backend") == "ncclep":
        yield "--moe-flex-dispatcher-backend ncclep is priced as hybridep, which it mirrors"
    for name in ("hidden-dropout", "attention-dropout"):
        if name not in flags.values:
            yield f"no --{name}: Megatron-LM drops 10 % and keeps the masks; --{name} 0 is usual"
    is_selective = flags.word("recompute-granularity") == "selective" or any(
        flags.is_on(name) for name in ("recompute-activations", "moe-layer-recompute")
    )
    if "recompute-modules" in flags.values and not is_selective:
        yield (
            f"{flags.said('recompute-modules')} has no effect without "
            "--recompute-granularity selective"
        )
    if "ddp-num-buckets" in flags.values:
        yield (
            f"{flags.said('ddp-num-buckets')} is priced as the engine's own size of buckets; "
            "--ddp-bucket-size is priced as it is"
        )
    elif "ddp-bucket-size" in flags.values and not flags.is_on("overlap-grad-reduce"):
        yield f"{flags.said('ddp-bucket-size')} has no effect without --overlap-grad-reduce"
    if flags.is_on("async-save") and _waits_for_saves(flags, has_recipe=has_recipe):
        yield (
            "--async-save without --use-persistent-ckpt-worker: training waits for checkpoints, as"
            " Megatron-LM turns the one off without the other from core_v0.16.0 on"
        )
    if "recompute-method" in flags.values and "recompute-granularity" not in flags.values:
        yield f"{flags.said('recompute-method')} has no effect without --recompute-granularity full"


def _renamed(given: Flags) -> Flags:
    """Replace the names of config files by the engine's own."""
    values: dict[str, tuple[str, ...]] = {}
    for name, words in given.values.items():
        if name in table.REMOVED:
            raise SpecError(
                f"{given.source}: --{name} is no longer read by Megatron-LM; say "
                f"{table.REMOVED[name]}"
            )
        flag = table.ALIASES.get(name, name)
        flag, words = _negated(flag, words)
        if flag in values and values[flag] != words:
            raise SpecError(
                f"{given.source}: --{flag} {' '.join(values[flag])} and --{name} {' '.join(words)} "
                "say the same with different values; keep one"
            )
        values[flag] = words
    return Flags(
        source=given.source,
        values=values,
        notes=given.notes,
        nodes=given.nodes,
        devices_per_node=given.devices_per_node,
        environment=given.environment,
    )


def _negated(name: str, words: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """Return a field that is on by default as the flag that turns it off, with the value turned."""
    candidates = (table.OFF_FLAGS.get(name), f"no-{name}", f"disable-{name}")
    off = next((flag for flag in candidates if flag in table.SWITCHES), None)
    if off is None:
        return name, words
    word = " ".join(words).casefold()
    return off, () if word in OFF else ("false",) if word in ("", *ON) else words


def _precision(flags: Flags) -> dict[str, Any]:
    eight, four = flags.word("fp8-format"), flags.word("fp4-format")
    if eight and four:
        raise SpecError(
            f"{flags.source}: {flags.said('fp8-format')} and {flags.said('fp4-format')}: choose one"
        )
    is_half, is_brain = flags.is_on("fp16"), flags.is_on("bf16")
    if is_half and is_brain:
        raise SpecError(f"{flags.source}: --fp16 and --bf16: choose one")
    recipes = ("tensorwise", "delayed", "mxfp8", "blockwise", "custom")
    recipe = ""
    if eight:
        recipe = flags.choice("fp8-recipe", recipes, "delayed")
    if four:
        recipe = "nvfp4"
    plain = "fp16" if is_half else "bf16" if is_brain else "fp32"
    return {"precision": plain, "fp8_recipe": recipe}


def _logit_bytes(flags: Flags) -> float:
    """Return bytes of a logit at the head's backward pass."""
    if not flags.is_on("cross-entropy-loss-fusion"):
        return UNFUSED_LOGIT_BYTES
    name = "cross-entropy-fusion-impl"
    return LOGIT_BYTES[flags.choice(name, tuple(LOGIT_BYTES), "native")]


def _recompute(flags: Flags) -> dict[str, Any]:
    granularity = flags.choice(
        "recompute-granularity",
        ("full", "selective"),
        "selective" if flags.is_on("recompute-activations") else "none",
    )
    modules = flags.words("recompute-modules")
    if flags.is_on("moe-layer-recompute") and granularity != "full":
        granularity, modules = "selective", (*modules, "moe")
    if granularity == "selective":
        modules = tuple(dict.fromkeys(modules)) or ("core_attn",)
    for module in modules:
        if module not in RECOMPUTE_MODULES:
            raise SpecError(
                f"{flags.source}: --recompute-modules {shown_value(module)} is none of "
                f"{', '.join(RECOMPUTE_MODULES)}"
            )
    method = flags.choice("recompute-method", ("uniform", "block"), "")
    layers = flags.number("recompute-num-layers")
    is_listed = "recompute-layer-ids" in flags.values
    if granularity == "full" and not ((method and layers) or is_listed):
        raise SpecError(
            f"{flags.source}: --recompute-granularity full needs --recompute-method uniform or "
            "block and --recompute-num-layers; add e.g. --recompute-method uniform "
            "--recompute-num-layers 1"
        )
    if granularity == "selective" and (method or layers):
        extra = flags.said("recompute-method" if method else "recompute-num-layers")
        raise SpecError(
            f"{flags.source}: {extra} belongs to --recompute-granularity full, not selective; "
            "leave it out"
        )
    return {
        "recompute": Recompute(granularity),
        "recompute_modules": modules if granularity == "selective" else (),
        "recompute_method": method,
        "recompute_layers": layers,
    }


def _zero_stage(flags: Flags) -> Literal[0, 1, 2, 3]:
    if flags.is_on("use-megatron-fsdp") or flags.is_on("use-custom-fsdp"):
        choices = tuple(_SHARDING)
        name = flags.choice("data-parallel-sharding-strategy", choices, "optim_grads_params")
        return _SHARDING[name]
    if flags.is_on("use-torch-fsdp2"):
        return 2 if flags.is_on("torch-fsdp2-no-reshard-after-forward") else 3
    # Muon's is sharded by whole parameters; `dist_muon` is its name up to core_v0.17.1.
    is_layer_wise = (flags.word("optimizer") or "").startswith("dist_")
    return 1 if is_layer_wise or flags.is_on("use-distributed-optimizer") else 0


def _experts(flags: Flags, *, has_recipe: bool) -> dict[str, Any]:
    """Return how experts take their tokens; a negative capacity means none."""
    capacity = flags.real("moe-expert-capacity-factor")
    pads = flags.is_on("moe-pad-expert-input-to-capacity")
    if pads and (capacity is None or capacity <= 0.0):
        raise SpecError(
            f"{flags.source}: --moe-pad-expert-input-to-capacity needs"
            " --moe-expert-capacity-factor; add it, e.g. --moe-expert-capacity-factor 1.0"
        )
    name = "moe-grouped-gemm"
    return {
        "expert_capacity": capacity if capacity and capacity > 0.0 else None,
        "pads_to_capacity": pads,
        "sequential_experts": not (flags.is_on(name) if name in flags.values else has_recipe),
    }


def _dispatcher(flags: Flags) -> TokenDispatcher:
    kind = flags.choice(
        "moe-token-dispatcher-type", ("allgather", "alltoall", "flex", "alltoall_seq"), "allgather"
    )
    if flags.is_on("moe-enable-deepep") and kind != "flex":
        raise SpecError(
            f"{flags.source}: --moe-enable-deepep needs --moe-token-dispatcher-type flex, "
            f"not {kind}"
        )
    if kind != "flex":
        return TokenDispatcher.ALLGATHER if kind == "allgather" else TokenDispatcher.ALLTOALL
    backend = flags.choice(
        "moe-flex-dispatcher-backend", ("deepep", "hybridep", "ncclep"), "deepep"
    )
    return TokenDispatcher.DEEPEP if backend == "deepep" else TokenDispatcher.HYBRIDEP


def _switches(flags: Flags, zero_stage: int) -> dict[str, Any]:
    switches = {field: flags.is_on(table.SPELLED[field]) for field in table.ON_OFF}
    # Megatron-FSDP overlaps what it shards, whatever the flags say.
    switches["overlap_grad_reduce"] |= zero_stage >= 2
    switches["overlap_param_gather"] |= zero_stage == 3
    return switches


def _graphs(flags: Flags) -> Graphs:
    choices = ("none", "local", "transformer_engine", "full_iteration")
    legacy = flags.is_on("enable-cuda-graph") or flags.is_on("external-cuda-graph")
    kind = flags.choice("cuda-graph-impl", choices, "local" if legacy else "none")
    scope = (*flags.words("cuda-graph-scope"), *flags.words("cuda-graph-modules"))
    if kind == "full_iteration" or (kind == "local" and "full_iteration" in scope):
        return Graphs.FULL
    return Graphs.NONE if kind == "none" else Graphs.PARTIAL


def _saves_nowhere(flags: Flags) -> bool:
    """Say whether no folder is named, not even by a variable that the text leaves open."""
    return "save" not in flags.values and not any(note.startswith(UNSET) for note in flags.notes)


def _waits_for_saves(flags: Flags, *, has_recipe: bool) -> bool:
    """Return whether asynchronous saving is off; Megatron-Bridge has the worker by default."""
    worker = "use-persistent-ckpt-worker"
    return not (flags.is_on(worker) if worker in flags.values else has_recipe)


def _retention(flags: Flags) -> dict[str, int | None]:
    """Return which checkpoints a launch keeps; Bridge's number is no flag of Megatron-LM."""
    newest = flags.number("most-recent-k", least=-1) or -1
    retain = flags.number(table.SPELLED["retain_interval"])
    if retain is not None:
        return {"kept_checkpoints": 1, "retain_interval": retain}
    return {"kept_checkpoints": newest if newest > 0 else None}


def _saves_to_hosts(flags: Flags) -> dict[str, int | None]:
    """Return what a launch says of checkpoints on hosts; empty where it has none."""
    if flags.word("non-persistent-ckpt-type") != "local":
        return {}
    settings = {"host_save_interval": flags.number("non-persistent-save-interval")}
    if not flags.is_on("replication"):
        return settings
    jump = flags.number("replication-jump")
    if jump is None:
        raise SpecError(
            f"{flags.source}: --replication needs --replication-jump, the devices of a node"
        )
    copies = flags.number("replication-factor") or 2
    return settings | {"host_copies": copies, "replication_jump": jump}


def _bucket(flags: Flags) -> int | None:
    if "ddp-bucket-size" in flags.values and "ddp-num-buckets" in flags.values:
        raise SpecError(
            f"{flags.source}: {flags.said('ddp-num-buckets')} and {flags.said('ddp-bucket-size')}: "
            "choose one"
        )
    return flags.number("ddp-bucket-size")


def _flash(flags: Flags) -> bool:
    if flags.word("attention-backend") in ("unfused", "local"):
        return False
    return flags.word("transformer-impl") != "local" or flags.is_on("use-flash-attn")


def _dropout(flags: Flags, name: str) -> float:
    share = flags.share(name)
    return 0.1 if share is None else share


def _offload(flags: Flags) -> float:
    if not flags.is_on("optimizer-cpu-offload"):
        return 0.0
    share = flags.share("optimizer-offload-fraction")
    return 1.0 if share is None else share


def _stated(flags: Flags) -> Iterator[StatedSize]:
    """Yield the model's sizes; where layers are stated, absent flags count by their default."""
    numbers = {size: flags.number(name, least=0) for size, name in table.SIZES.items()}
    hybrid = _hybrid(flags)
    if hybrid:
        # The engine counts letters, and a layer of the model may be two of them.
        numbers["num_layers"] = None
    for size, value in numbers.items():
        if value:
            yield StatedSize(size=size, value=value, said=flags.said(table.SIZES[size]))
    layers, experts = numbers["num_layers"], numbers["num_experts"]
    if not layers and not (hybrid and numbers["hidden_size"]):
        # A recipe has the sizes, also those beside a pattern.
        return
    if not experts:
        yield StatedSize(size="num_experts", value=0, said="no --num-experts")
    if layers:
        yield from _stated_layers(flags, layers, has_experts=bool(experts))
    yield from _stated_attention(flags, numbers["num_heads"])
    dense = flags.number("ffn-hidden-size")
    if dense:
        # Without a width of their own the experts have that of the dense layers.
        said = flags.said("ffn-hidden-size")
        if experts and not numbers["expert_ffn_size"]:
            yield StatedSize(size="expert_ffn_size", value=dense, said=said)
        yield StatedSize(size="dense_ffn_size", value=dense, said=said)
    for size, name in (
        ("ffn_is_gated", "swiglu"),
        ("is_untied", "untie-embeddings-and-output-weights"),
    ):
        is_on = flags.is_on(name)
        yield StatedSize(size=size, value=is_on, said=f"--{name}" if is_on else f"no --{name}")


def _stated_layers(flags: Flags, layers: int, *, has_experts: bool) -> Iterator[StatedSize]:
    """Yield which layers have experts and linear attention, and whether attention is sparse."""
    if has_experts:
        word = " ".join(flags.words("moe-layer-freq")) or "1"
        pattern = layer_pattern(word, num_layers=layers, said=f"{flags.source}: --moe-layer-freq")
        yield StatedSize(size="moe_layers", value=pattern, said=f"--moe-layer-freq {word}")
    variant = flags.choice(_VARIANT.lstrip("-"), _VARIANTS, "")
    said = f"{_VARIANT} {variant}" if variant else f"no {_VARIANT}"
    yield StatedSize(size="is_sparse", value=variant == "dsa", said=said)
    linear: tuple[int, ...] = (0,) * layers
    if variant == "gated_delta_net":
        name = "--linear-attention-freq"
        word = " ".join(flags.words(name.lstrip("-")))
        linear = linear_pattern(word, num_layers=layers, said=f"{flags.source}: {name}")
        said = f"{name} {word}"
    yield StatedSize(size="linear_layers", value=linear, said=said)


def _stated_attention(flags: Flags, heads: int | None) -> Iterator[StatedSize]:
    name = "attention-output-gate"
    is_on = flags.is_on(name)
    yield StatedSize(
        size="has_output_gate", value=is_on, said=f"--{name}" if is_on else f"no --{name}"
    )
    is_latent = flags.is_on("multi-latent-attention")
    yield StatedSize(
        size="is_mla",
        value=is_latent,
        said="--multi-latent-attention" if is_latent else "no --multi-latent-attention",
    )
    if is_latent or not heads:
        return
    groups = flags.number("num-query-groups") if flags.is_on("group-query-attention") else None
    said = "no --group-query-attention" if groups is None else flags.said("num-query-groups")
    yield StatedSize(size="num_kv_heads", value=groups or heads, said=said)
