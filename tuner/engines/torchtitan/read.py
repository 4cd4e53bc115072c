"""torchtitan's TOML, Primus' YAML or the command of release 0.3 (command.py) as `LaunchSettings`.

Names and defaults of the job config of github.com/pytorch/torchtitan before its configs became
Python (pull request 2386), and the names that release 0.3 gave to some of them, which are in the
sections that moetune writes (tuner/engines/torchtitan/write.py). Batches are counted differently:
`local_batch_size` is what one data-parallel rank works on at once, cut into micro-batches only by
the pipeline.

Priced as the nearest modelled setting: selective checkpointing of every n-th layer as
full recomputation of 1/n of them, a memory budget b as 1 - b of them.
"""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from profilers.steps.config import Recompute
from tuner.engines.megatron_lm import primus
from tuner.engines.reading.launch import (
    Effect,
    Graphs,
    LaunchSettings,
    StageContent,
    StatedSize,
    TokenDispatcher,
    TrainingEngine,
    UnpricedSetting,
)
from tuner.engines.reading.mistakes import read_sections
from tuner.engines.reading.nearest import nearest_divisor
from tuner.engines.reading.sections import Sections
from tuner.engines.reading.variables import defaults_note, with_defaults
from tuner.engines.torchtitan.command import overridden, read_training_command
from tuner.errors import SpecError
from tuner.spec.files import one_line, shown_value
from tuner.spec.yaml_text import parse_yaml

SPELLED: Final[Mapping[str, str]] = {
    "tensor": "parallelism.tensor_parallel_degree",
    "context": "parallelism.context_parallel_degree",
    "pipeline": "parallelism.pipeline_parallel_degree",
    "expert": "parallelism.expert_parallel_degree",
    "expert_tensor": "parallelism.expert_tensor_parallel_degree",
    "data": "parallelism.data_parallel_replicate_degree * data_parallel_shard_degree",
    "sequence": "training.seq_len",
    "micro_batch": "parallelism.pipeline_parallel_microbatch_size",
    "local_batch": "training.local_batch_size",
    "flush": "training.local_batch_size",
    "global_batch": "training.global_batch_size",
    "layers_per_virtual_stage": "parallelism.pipeline_parallel_layers_per_stage",
    "layout": "parallelism.module_fqns_per_model_part",
    "virtual_pipeline": "parallelism.pipeline_parallel_schedule",
    "recompute": "activation_checkpoint.mode",
    "dispatcher": "parallelism.expert_parallel_comm_backend",
    "a2a_overlap": "parallelism.pipeline_parallel_expert_parallel_overlap",
    "zero_stage": "parallelism.data_parallel_shard_degree",
    "kept_checkpoints": "checkpoint.keep_latest_k",
}
_UNPRICED: Final[Mapping[str, tuple[tuple[Any, ...], Effect, str]]] = {
    "training.enable_cpu_offload": (
        (False,),
        "time",
        "the host runs PyTorch's optimizer, priced at the speed of its memory",
    ),
    "optimizer.early_step_in_backward": ((False,), "memory", "gradients are freed one by one"),
    "training.mixed_precision_reduce": (("float32",), "time", "gradients are half as large"),
    "optimizer.name": (("Adam", "AdamW"), "memory", "another optimizer has other states"),
}
"""Settings without a price: values that change nothing, and what does not hold at others."""
_PRIMUS: Final = re.compile(r"^ +framework: *[\"']?torchtitan\b", re.MULTILINE)
_IN_8_BITS: Final = re.compile(r"^ +model: *\S*-fp8\.yaml", re.MULTILINE)
"""Models of Primus whose linear layers run in fp8 (primus/configs/models/torchtitan)."""
_SINGLE_STAGE: Final = ("1F1B", "GPipe")
_MULTI_STAGE: Final = (
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
_ZERO_BUBBLE: Final = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
_FORMER: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("training", "batch_size"): ("training", "local_batch_size"),
    ("training", "data_parallel_degree"): ("parallelism", "data_parallel_shard_degree"),
    **{
        ("training", name): ("parallelism", name)
        for name in (
            *("data_parallel_shard_degree", "data_parallel_replicate_degree"),
            *("tensor_parallel_degree", "enable_loss_parallel"),
        )
    },
    **{
        ("experimental", name): ("parallelism", name)
        for name in (
            *("pipeline_parallel_degree", "pipeline_parallel_schedule"),
            *("pipeline_parallel_split_points", "context_parallel_degree"),
            *("enable_async_tensor_parallel", "pipeline_parallel_microbatches"),
        )
    },
    ("training", "compile"): ("compile", "enable"),
    ("training", "enable_float8_linear"): ("model", "converters"),
    ("float8", "enable_float8_linear"): ("model", "converters"),
}
"""Keys of torchtitan's files before release 0.1 (train_configs of 2024), by section: today's."""
_OF_TRANSFORMERS: Final = "transformers_modeling_backend"
"""The experiment that trains Transformers' own modules."""
_ENABLED_IN_0_1: Final = "checkpoint.enable_checkpoint"
"""Switch of checkpoints in every file up to August 2025, which is `checkpoint.enable` since."""
_MOST_PARTS: Final = 2000
"""Dots of one line."""
_LARGEST_STAGES: Final = 10_000


def read(
    text: str,
    *,
    source: str,
    command_words: Sequence[str] = (),
    beside: Callable[[str], str | None] = lambda _: None,
) -> LaunchSettings:
    """Read a TOML file, or text with the command of release 0.3.

    Args:
        text: of the file or the script.
        source: what messages call it.
        command_words: words of the command that names a TOML file, whose flags override it.
        beside: the text of a file of torchtitan's repository.

    Raises:
        SpecError: neither, or a setting that torchtitan refuses.
    """
    command = None if _is_toml(text) else read_training_command(text, source=source, beside=beside)
    if command is None:
        values = _renewed(overridden(_toml(text, source=source), command_words, source=source))
        return read_sections(values, lambda given: _settings(given, {}, notes=()), source=source)
    settings = read_sections(
        command.sections,
        lambda given: _settings(given, command.devices, notes=command.notes),
        source=source,
    )
    # Release 0.3 cuts the loss into chunks (config_registry.py of its models).
    compiled = _compiled(Sections(command.sections, source=source)) | {"loss"}
    opened = {} if command.is_known else _left_open(command.sections, settings)
    return settings.model_copy(update={"compiled": compiled, **opened})


def _left_open(sections: Mapping[str, Any], settings: LaunchSettings) -> dict[str, Any]:
    """Return what the spec says in place of a configuration that nothing is known of."""
    stated = sections.get("training", {})
    opened: dict[str, Any] = {} if "seq_len" in stated else {"sequence": None}
    if settings.pipeline == 1 and "local_batch_size" not in stated:
        opened |= {"micro_batch_follows": True, "accumulation": None}
    return opened


def trains_under_primus(text: str) -> bool:
    """Return whether a text is Primus' YAML whose framework is torchtitan."""
    return _PRIMUS.search(text) is not None


def read_primus(text: str, *, source: str) -> LaunchSettings:
    """Read Primus' YAML: torchtitan's sections over Primus' own defaults.

    Raises:
        SpecError: not plain YAML, another framework's, or a setting that torchtitan refuses.
    """
    variables: dict[str, str] = {}
    raw = parse_yaml(with_defaults(text, variables), source=source)
    whole = raw if isinstance(raw, dict) else {}
    eight = {"model.converters": ["quantize.linear.float8"]} if _IN_8_BITS.search(text) else {}
    return read_sections(
        primus.overrides(whole, source=source, framework="torchtitan") or {},
        lambda given: _settings(given, {}, notes=defaults_note(variables)),
        source=source,
        defaults={**primus.TORCHTITAN, **eight},
    )


def _is_toml(text: str) -> bool:
    try:
        return bool(_toml(text, source=""))
    except SpecError:
        return False


def _toml(text: str, *, source: str) -> dict[str, Any]:
    # tomllib's memory is quadratic in the parts of a key.
    if any(line.count(".") > _MOST_PARTS for line in text.splitlines()):
        raise SpecError(f"{source}: nested too deeply")
    try:
        raw = tomllib.loads(text)
    except RecursionError as error:
        raise SpecError(f"{source}: nested too deeply") from error
    except ValueError as error:
        raise SpecError(one_line(f"{source}: not valid TOML: {error}")) from error
    if not {"training", "parallelism"} & set(raw):
        raise SpecError(f"{source}: no [training] or [parallelism] section, so not torchtitan's")
    return raw


def _renewed(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the sections of a file of 2024 under today's names; newer ones as they are.

    Degrees left [training] and [experimental] on 18 March 2025 (torchtitan#980), two weeks before
    the loss was compiled again (#1033; since e8977b0 of December 2024 it was not).
    """
    sections = {name: dict(keys) if isinstance(keys, dict) else keys for name, keys in raw.items()}
    for (section, key), (new_section, new_key) in _FORMER.items():
        keys = sections.get(section)
        if not isinstance(keys, dict) or key not in keys or isinstance(keys[key], dict):
            continue
        value = keys.pop(key)
        target = sections.setdefault(new_section, {})
        if new_key == "converters":
            value = ["float8"] if value else []
        if new_section == "parallelism":
            layers_only = sections.setdefault("compile", {})
            if isinstance(layers_only, dict):
                layers_only.setdefault("components", ["model"])
        if isinstance(target, dict):
            target.setdefault(new_key, value)
    return {name: keys for name, keys in sections.items() if keys != {} or raw.get(name) == {}}


def _settings(
    given: Sections, devices: Mapping[str, Any], *, notes: tuple[str, ...]
) -> LaunchSettings:
    tensor = given.number(SPELLED["tensor"], default=1)
    pipeline = given.number(SPELLED["pipeline"], default=1)
    context = given.number(SPELLED["context"], default=1)
    replicate, shard = _data(given)
    schedule = given.word(
        SPELLED["virtual_pipeline"], default="1F1B", choices=(*_SINGLE_STAGE, *_MULTI_STAGE)
    )
    local, micro_batch = _batches(given, pipeline=pipeline)
    expert = given.number(SPELLED["expert"], default=1)
    zero_stage = _zero_stage(given, shard=shard, context=context, pipeline=pipeline)
    overlaps = given.is_on(SPELLED["a2a_overlap"], default=True)
    settings: dict[str, Any] = {
        "tensor": tensor,
        "context": context,
        "pipeline": pipeline,
        "expert": expert,
        "expert_tensor": given.number(SPELLED["expert_tensor"], default=1)
        if expert > 1
        else tensor,
        "data": None if shard is None else replicate * shard,
        "replicas": replicate,
        "sequence_parallel": tensor > 1
        and given.is_on("parallelism.enable_sequence_parallel", default=True),
        "sequence": given.number(SPELLED["sequence"], default=2048),
        # Of text; masks keep its documents apart.
        "packing": "wrapped",
        "micro_batch": micro_batch,
        "global_batch": _global_batch(given),
        "zero_stage": zero_stage,
        **_stages(given, pipeline=pipeline, schedule=schedule),
        **_recompute(given),
        **_precision(given),
        "compiled": _compiled(given),
        # They are kept from 6 September 2025 on (#1672); the key was renamed a fortnight before.
        "drops_exchanged": given.value(_ENABLED_IN_0_1) is not None,
        "dispatcher": _dispatcher(given),
        "buffered_ratio": _buffered(given),
        "cuda_graph": _graphs(given, pipeline=pipeline, expert=expert),
        "a2a_overlap": overlaps and schedule == "DualPipeV" and pipeline > 1 and expert > 1,
        "overlap_grad_reduce": True,
        "overlap_param_gather": zero_stage > 0,
        "overlap_tensor": given.is_on("parallelism.enable_async_tensor_parallel")
        # Release 0.3 has it with what is compiled.
        or (given.is_on("compile.enable") and given.is_on("compile.enable_async_tensor_parallel")),
        "optimizer_offload_ratio": float(given.is_on("training.enable_cpu_offload")),
        "parameter_offload": zero_stage == 3 and given.is_on("training.enable_cpu_offload"),
        **_stored(given),
        "unpriced": tuple(_unpriced(given)),
        "stated": _stated(given),
        **_saving(given),
    }
    if settings["global_batch"] is None:
        settings["accumulation"] = local // micro_batch
    elif pipeline > 1:
        # Accumulation runs the pipeline empty after every local batch.
        settings["flush"] = local
    notes = (*_notes(given), *notes)
    given.check_spelling()
    return LaunchSettings(
        engine=TrainingEngine.TORCHTITAN,
        source=given.source,
        spelled=dict(SPELLED),
        understood=given.read,
        ignored=given.left,
        notes=notes,
        **devices,
        **settings,
    )


def _compiled(given: Sections) -> frozenset[str]:
    """Return what is compiled: nothing by default; release 0.1 says it in [training].

    Of Transformers' layers with experts it is the router alone (pull request 2679).
    """
    is_on = given.is_on("compile.enable") or given.is_on("training.compile")
    components = given.value("compile.components")
    if components is None:
        components = ["model", "loss"]
    if not isinstance(components, list) or not set(map(str, components)) <= {"model", "loss"}:
        raise SpecError(
            f"{given.source}: compile.components {shown_value(components)} is no list of 'model'"
            " and 'loss'"
        )
    if (
        given.value("model.name") == _OF_TRANSFORMERS
        and given.number(SPELLED["expert"], default=1) > 1
    ):
        components = [name for name in components if name != "model"]
    return frozenset(map(str, components)) if is_on else frozenset()


def _stored(given: Sections) -> dict[str, int]:
    """Return bytes of parameters and of what has their type: gradients and moments."""
    word = given.word("training.dtype", default="float32", choices=("float32", "bfloat16"))
    if word == "float32":
        return {}
    return {"master_bytes": 2, "moments_bytes": 4, "gradient_bytes": 2}


def _unpriced(given: Sections) -> Iterator[UnpricedSetting]:
    for name, (usual, changes, how) in _UNPRICED.items():
        if given.value(name) not in (None, *usual):
            yield UnpricedSetting(said=name, changes=changes, how=how)


def _dispatcher(given: Sections) -> TokenDispatcher:
    """Read the dispatcher, which release 0.3 states with the model."""
    model_word = given.word(
        "model.moe_comm_backend", default="standard", choices=("standard", "deepep", "hybridep")
    )
    word = given.word(
        SPELLED["dispatcher"], default=model_word, choices=("standard", "deepep", model_word)
    )
    return {"deepep": TokenDispatcher.DEEPEP, "hybridep": TokenDispatcher.HYBRIDEP}.get(
        word, TokenDispatcher.ALLTOALL
    )


def _buffered(given: Sections) -> float:
    """Return the share of the worst case that HybridEP's buffers hold; 0: it asks what comes."""
    name = "model.non_blocking_capacity_factor"
    share = given.value(name)
    if share is None:
        return 0.0
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise SpecError(
            f"{given.source}: {name} {shown_value(share)} is not above 0 and at most 1; without it"
            " HybridEP asks how many copies come"
        )
    return float(share)


def _graphs(given: Sections, *, pipeline: int, expert: int) -> Graphs:
    """Say whether a whole step is one graph; without the key it is a release before 0.3.

    Release 0.3 (trainer.py, `_validate_cuda_graphs`) stops where it would be asked for with a
    pipeline or with a dispatcher that waits for the host, which all but HybridEP do. A launch that
    leaves the switch out with those is of an older state, which had no graphs (torchtitan#3559 of
    13 August 2026).
    """
    is_off = given.is_on("training.disable_cuda_graphs", default=True)
    waits = expert > 1 and _dispatcher(given) is not TokenDispatcher.HYBRIDEP
    return Graphs.NONE if is_off or pipeline > 1 or waits else Graphs.FULL


def _saving(given: Sections) -> dict[str, Any]:
    """Return when checkpoints are saved; release 0.1 says enable_checkpoint."""
    is_on = given.is_on("checkpoint.enable") or given.is_on(_ENABLED_IN_0_1)
    interval = given.number("checkpoint.interval", default=500)
    mode = given.word(
        "checkpoint.async_mode",
        default="disabled",
        choices=("disabled", "async", "async_with_pinned_mem"),
    )
    kept = given.number(SPELLED["kept_checkpoints"], default=10, least=0)
    if not is_on:
        return {}
    return {
        "save_interval": interval,
        "saves_in_background": mode != "disabled",
        "saves_from_pinned_memory": mode == "async_with_pinned_mem",
        "kept_checkpoints": kept or None,
    }


def _data(given: Sections) -> tuple[int, int | None]:
    replicate = given.number("parallelism.data_parallel_replicate_degree", default=1)
    shard = given.number(SPELLED["zero_stage"], default=-1, least=-1)
    if shard == 0:
        raise SpecError(
            f"{given.source}: {SPELLED['zero_stage']} 0: -1 takes all ranks that are left, 1 turns "
            "sharding off"
        )
    return replicate, None if shard == -1 else shard


def _batches(given: Sections, *, pipeline: int) -> tuple[int, int]:
    """Return sequences of one data-parallel rank at once, and of one micro-batch."""
    local = given.number(SPELLED["local_batch"], default=8)
    micro = given.number(SPELLED["micro_batch"], default=1)
    if pipeline == 1:
        return local, local
    if local % micro:
        nearest = nearest_divisor(local, micro)
        raise SpecError(
            f"{given.source}: {SPELLED['local_batch']} {local} is not divisible by "
            f"{SPELLED['micro_batch']} {micro}; the nearest that divides it is {nearest}"
        )
    return local, micro


def _global_batch(given: Sections) -> int | None:
    stated = given.number(SPELLED["global_batch"], default=-1, least=-1)
    return stated if stated > 0 else None


def _zero_stage(
    given: Sections, *, shard: int | None, context: int, pipeline: int
) -> Literal[0, 2, 3]:
    """FSDP gathers parameters again for backward, except by option or under a pipeline."""
    policy = given.word(
        "parallelism.fsdp_reshard_after_forward",
        default="default",
        choices=("default", "always", "never"),
    )
    if shard == 1 and context == 1:
        return 0
    return 3 if policy == "always" or (policy == "default" and pipeline == 1) else 2


def _stages(given: Sections, *, pipeline: int, schedule: str) -> dict[str, Any]:
    """Return how layers are divided; earlier stages get the remainder."""
    if pipeline == 1:
        return {}
    parts = given.value(SPELLED["layout"])
    first = given.number(
        "parallelism.pipeline_parallel_first_stage_less_layers", default=1, least=0
    )
    last = given.number("parallelism.pipeline_parallel_last_stage_less_layers", default=1, least=0)
    settings: dict[str, Any] = {
        "zero_bubble": schedule in _ZERO_BUBBLE,
        "embedding_as_layers": first,
        "loss_as_layers": last,
        "uneven_division": True,
    }
    if parts is not None:
        # An explicit layout leaves nothing to divide.
        undivided = {"embedding_as_layers": 0, "loss_as_layers": 0}
        return settings | undivided | {"layout": _parts(given, parts)}
    layers = given.number(SPELLED["layers_per_virtual_stage"], default=0, least=0)
    if layers:
        return settings | {"layers_per_virtual_stage": layers}
    return settings | {"virtual_pipeline": 1 if schedule in _SINGLE_STAGE else 2}


def _parts(given: Sections, parts: Any) -> tuple[StageContent, ...]:
    """Read a list of lists of module names."""
    is_list = isinstance(parts, list) and 0 < len(parts) <= _LARGEST_STAGES
    if not is_list or not all(
        isinstance(part, list) and all(isinstance(name, str) for name in part) for part in parts
    ):
        raise SpecError(f"{given.source}: {SPELLED['layout']} is no list of lists of module names")
    return tuple(
        StageContent(
            layers=sum(name.startswith("layers.") for name in part),
            embedding="tok_embeddings" in part,
            loss="output" in part or "lm_head" in part,
        )
        for part in parts
    )


def _recompute(given: Sections) -> dict[str, Any]:
    mode = given.word(
        SPELLED["recompute"],
        default="selective",
        choices=("none", "selective", "full", "memory_budget"),
    )
    if mode == "none":
        return {"recompute": Recompute.NONE}
    if mode == "full":
        return {"recompute": Recompute.FULL}
    if mode == "memory_budget":
        budget = given.value("activation_checkpoint.memory_budget")
        budget = 0.5 if budget is None else budget
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= 1:
            raise SpecError(
                f"{given.source}: activation_checkpoint.memory_budget {shown_value(budget)} is "
                "outside 0..1"
            )
        return {"recompute": Recompute.FULL, "recompute_ratio": 1.0 - float(budget)}
    option = given.word("activation_checkpoint.selective_ac_option", default="2")
    if option == "op":
        return {"recompute": Recompute.SELECTIVE, "recompute_by_op": True}
    if not (option.isdecimal() and option.isascii() and len(option) < 6 and int(option)):
        raise SpecError(
            f"{given.source}: activation_checkpoint.selective_ac_option {shown_value(option)} is "
            "neither 'op' nor the text of a number such as '2'"
        )
    return {"recompute": Recompute.FULL, "recompute_ratio": 1.0 / int(option)}


def _precision(given: Sections) -> dict[str, Any]:
    """Find the GEMM precision; converters switch the sections of [quantize] on."""
    converters = given.value("model.converters") or []
    if not isinstance(converters, list) or not all(isinstance(name, str) for name in converters):
        raise SpecError(f"{given.source}: model.converters is no list of names")
    plain = given.word(
        "training.mixed_precision_param", default="bfloat16", choices=("bfloat16", "float32")
    )
    recipe = ""
    opaque = {}
    if "nvfp4" in converters:
        recipe = "nvfp4"
        tail = given.value("model.bf16_tail_fraction")
        opaque = {"opaque_gemm_ratio": 1.0 - (tail if isinstance(tail, float) else 0.0)}
    elif any("mx" in name for name in converters):
        recipe = "mxfp8"
    elif any("float8" in name for name in converters):
        # The section was [float8] up to August 2025, and its key None by default.
        former = given.word("float8.recipe_name", default="tensorwise")
        named = given.word("quantize.linear.float8.recipe_name", default=former)
        recipe = "tensorwise" if named == "tensorwise" else "blockwise"
    precision = "bf16" if plain == "bfloat16" else "fp32"
    return {"precision": precision, "fp8_recipe": recipe, **opaque}


def _stated(given: Sections) -> tuple[StatedSize, ...]:
    flavor = given.value("model.flavor")
    name = given.value("model.name")
    if not isinstance(flavor, str) or not isinstance(name, str):
        return ()
    size = FLAVORS.get((name, flavor))
    if size is None:
        return ()
    said = f"model.name {name!r}, flavor {flavor!r}"
    return tuple(
        StatedSize(size=size_name, value=value, said=said)
        for size_name, value in zip(("num_layers", "hidden_size", "num_experts"), size, strict=True)
    )


FLAVORS: Final[Mapping[tuple[str, str], tuple[int, int, int]]] = {
    ("llama3", "8B"): (32, 4096, 0),
    ("llama3", "70B"): (80, 8192, 0),
    ("llama3", "405B"): (126, 16384, 0),
    ("deepseek_v3", "16B"): (27, 2048, 64),
    ("deepseek_v3", "236B"): (60, 5120, 160),
    ("deepseek_v3", "671B"): (61, 7168, 256),
    ("qwen3", "32B"): (64, 5120, 0),
    ("qwen3", "30B-A3B"): (48, 2048, 128),
    ("qwen3", "235B-A22B"): (94, 4096, 128),
}
"""Layers, hidden size and experts of what [model] names; others are not checked."""


def _notes(given: Sections) -> tuple[str, ...]:
    if given.value("activation_checkpoint.mode") == "memory_budget":
        return ("a memory budget b is priced as recomputing 1 - b of the layers",)
    return ()
