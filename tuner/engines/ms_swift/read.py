"""Megatron-SWIFT's launches as `LaunchSettings`: its flags by Megatron-LM's names, its defaults.

It builds megatron-core's configurations from its own arguments (swift/megatron/arguments), so the
settings are Megatron-LM's, with other defaults: weights in the checkpoint's 16 bits, the
distributed optimizer, dispatcher alltoall, no dropout, experts not split, recomputed attention
cores, batches of 16 in micro-batches of one, a fused cross entropy.

A sequence is `--max_length` tokens. With `--packing` every sample is filled up to it; without, it
is the longest that a sample may be, and the price is of such samples.

`megatron rlhf` trains by preferences. Beside a micro-batch's own pass a reference runs forward: a
frozen copy in the weights' type, sharded as they are, or under LoRA the model without its adapters;
KTO runs both forward once more for its estimate of the KL divergence (swift/megatron/trainers of
4.6: rlhf_mixin.py, dpo_trainer.py, kto_trainer.py). A sample of DPO and of reward models is two
sequences, which `--packing` counts in its packs.

Not covered: what generates or has a teacher (GRPO, GKD), KL batches of another length, vision
towers, LoRA's dropout, routers in fp32.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from tuner.engines.megatron_lm import flags as megatron
from tuner.engines.megatron_lm.optimizer_state import is_orthogonal
from tuner.engines.megatron_lm.read import settings_of
from tuner.engines.ms_swift import flags as table
from tuner.engines.ms_swift.command import (
    METHODS,
    SwiftCommand,
    command_flags,
    configured_flags,
    is_own_command,
    whole,
)
from tuner.engines.ms_swift.lora import stated_tune
from tuner.engines.reading.arguments import Flags
from tuner.engines.reading.launch import PACKED, LaunchSettings, TrainingEngine
from tuner.engines.reading.sections import MOST_SEARCHED
from tuner.engines.reading.shell_words import shell_text
from tuner.engines.reading.variables import QUEUES
from tuner.errors import SpecError
from tuner.spec.files import shown_value

_TRUTHS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("yes", "true", "t", "y", "1"), "true"),
    **dict.fromkeys(("no", "false", "f", "n", "0"), "false"),
}
"""Words of `string_to_bool` (transformers/hf_argparser.py)."""
_REFERENCE_FORWARDS: Final = {"dpo": 1, "kto": 3, "rm": 0}
"""Passes without gradients, by what `megatron rlhf` learns from; KTO's with its KL estimate."""
_SWITCHES: Final = megatron.SWITCHES | {"moe-grouped-gemm", "cross-entropy-loss-fusion"}
_OWN_KEYS: Final = tuple(
    re.compile(rf"^({keys}) *:", re.MULTILINE)
    for keys in ("tuner_type|train_type|max_length", r"micro_batch_size|\w+_parallel_size")
)
_OWN_ARGUMENTS: Final = re.compile(r"--(tuner|train)[_-]type\b")
_OWN_PROGRAM: Final = re.compile(rf"\b(megatron|swift)\b|{_OWN_ARGUMENTS.pattern}")


def starts(text: str) -> bool:
    """Return whether a text has a command of ms-swift, or lists Megatron-SWIFT's arguments."""
    if not _OWN_PROGRAM.search(text):
        return False
    try:
        commands = shell_text(text, source="the command").commands
    except SpecError:
        return False
    is_list = bool(_OWN_ARGUMENTS.search(text)) and all(
        command.words[0].startswith("-") for command in commands
    )
    return is_list or any(is_own_command(command.words) for command in commands)


def holds_settings(text: str) -> bool:
    """Return whether a text is a file of settings of Megatron-SWIFT."""
    return all(pattern.search(text) for pattern in _OWN_KEYS)


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
        beside: the text of a file that the command reads.

    Raises:
        SpecError: one line: what cannot be read, and what to write instead.
    """
    command, given = command_flags(text, source=source, environment=environment, beside=beside)
    return _settings(command, given)


def read_yaml(text: str, *, source: str) -> LaunchSettings:
    """Read a file of settings, as `megatron sft FILE` takes it.

    Raises:
        SpecError: not plain YAML, or settings that cannot be read.
    """
    values, variables = configured_flags(text, source=source)
    if not any(table.megatron_flag(flag.replace("-", "_")) for flag in values):
        raise SpecError(
            f"{source}: no setting of {table.RELEASE}, such as tensor_model_parallel_size, in it"
        )
    flags = Flags(
        source=source,
        values=values,
        notes=(),
        nodes=whole(variables.get("NNODES")) or 1,
        devices_per_node=whole(variables.get("NPROC_PER_NODE")),
        environment=variables,
    )
    return _settings(SwiftCommand(method="sft", is_megatron=True), flags)


def _settings(command: SwiftCommand, given: Flags) -> LaunchSettings:
    flags = _fields(given)
    preferences = _preferences(flags) if command.method == "rlhf" else {}
    tune = stated_tune(flags)
    for name in ("packing_length", "seq_length"):
        if name in flags.values:
            flags = replace(flags, values={**flags.values, "max_length": flags.values[name]})
            break
    theirs = dict(_theirs(flags))
    read_settings = settings_of(replace(flags, values=_with_defaults(flags, theirs)))
    understood = {name for name in flags.values if table.megatron_flag(name) or name in table.READ}
    return read_settings.model_copy(
        update={
            **preferences,
            "engine": TrainingEngine.MS_SWIFT,
            "tune": tune,
            "samples_vary": not _is_packed(flags),
            "spelled": {
                field: table.own_flag(said) for field, said in read_settings.spelled.items()
            },
            # `swift.cli._megatron.sft` sets it where nothing else does.
            "environment": {QUEUES: "1", **read_settings.environment},
            "balance": _owned(read_settings.balance),
            "differing_settings": {
                name: _owned(said) for name, said in read_settings.differing_settings.items()
            },
            "understood": tuple(flags.said(name) for name in flags.values if name in understood),
            "ignored": tuple(
                shown_value(flags.said(name))[1:-1]
                for name in flags.values
                if name not in understood
            ),
            "deprecated": tuple(
                f"--{old}: say --{new}"
                for old, new in table.OLDER.items()
                if {old, old.replace("_", "-")} & set(given.values)
            ),
            "notes": (
                *map(_owned, read_settings.notes),
                *_remarks(flags),
                *_preference_remarks(preferences, flags),
            ),
        }
    )


def _preferences(flags: Flags) -> dict[str, int]:
    """Return what runs beside the trained model, and the sequences of a sample.

    Raises:
        SpecError: something that generates or has a teacher.
    """
    kind = flags.word("rlhf_type") or "dpo"
    if kind not in _REFERENCE_FORWARDS:
        raise SpecError(
            f"{flags.source}: megatron rlhf --rlhf_type {shown_value(kind)[1:-1]} of"
            f" {table.RELEASE} generates or has a teacher beside the trained model, which has no"
            f" price here ({', '.join(_REFERENCE_FORWARDS)} have one); estimate the same flags as"
            f" megatron {METHODS[0]}, which is the trained model's share"
        )
    passes = _REFERENCE_FORWARDS[kind]
    if kind == "kto" and _TRUTHS.get((flags.word("calculate_KL") or "").casefold()) == "false":
        passes = 1
    is_pair = kind != "kto" and not _is_packed(flags)
    return {"reference_forwards": passes, "sequences_per_sample": 2 if is_pair else 1}


def _preference_remarks(preferences: Mapping[str, int], flags: Flags) -> Iterator[str]:
    kind = flags.word("rlhf_type") or "dpo"
    if passes := preferences.get("reference_forwards"):
        yield f"{kind}: forward passes without gradients beside each of the trained model: {passes}"
    if preferences.get("sequences_per_sample") == 2:
        yield "a sample is a chosen and a rejected sequence: printed batches count sequences"
    if preferences and kind == "rm":
        yield "--rlhf_type rm is priced with a head over the vocabulary"


def _is_packed(flags: Flags) -> bool:
    packing = flags.values.get("packing", ("false",))
    return not packing or _TRUTHS.get(packing[0].casefold()) != "false"


def _fields(given: Flags) -> Flags:
    """Return the flags by field, those of `--megatron_extra_kwargs` included."""
    values: dict[str, tuple[str, ...]] = {}
    unknown = 0
    for flag, words in given.values.items():
        finds_slips = unknown < MOST_SEARCHED
        name, is_off = table.field_of(flag, source=given.source, finds_slips=finds_slips)
        unknown += name not in table.NAMES
        if is_off:
            words = (
                ("true",) if words and _TRUTHS.get(words[0].casefold()) == "false" else ("false",)
            )
        values[name] = words
    extra = " ".join(values.get("megatron_extra_kwargs", ()))
    return replace(given, values={**values, **_extra(extra, source=given.source)})


def _extra(text: str, *, source: str) -> dict[str, tuple[str, ...]]:
    """Return fields of megatron-core that a launch sets as JSON."""
    if not text:
        return {}
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError):
        raw = None
    if not isinstance(raw, dict):
        raise SpecError(f"{source}: --megatron_extra_kwargs {shown_value(text)} is no JSON object")
    return {
        key.replace("-", "_"): tuple(map(str, value)) if isinstance(value, list) else (str(value),)
        for key, value in raw.items()
        if value is not None
    }


def _theirs(flags: Flags) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the flags that the price depends on, by Megatron-LM's names."""
    for name, words in flags.values.items():
        flag = table.megatron_flag(name)
        if flag is None or words == ("none",):
            continue
        is_switch = flag in _SWITCHES and len(words) == 1
        yield flag, (_TRUTHS.get(words[0].casefold(), words[0]),) if is_switch else words
    for name, (off, default) in table.OFF.items():
        words = flags.values.get(name, (str(default),))
        is_on = not words or _TRUTHS.get(words[0].casefold()) == "true"
        yield off, ("false",) if is_on else ()


def _with_defaults(flags: Flags, theirs: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    chosen = {flag: (word,) for flag, word in table.DEFAULTS.items()} | theirs
    if flags.values.get("recompute_granularity") == ("none",):
        del chosen["recompute-granularity"]
    if "recompute-modules" in chosen and chosen.get("recompute-granularity") != ("selective",):
        del chosen["recompute-modules"]
    # Adam's variants shard their state; Muon's do not (`_check_muon`).
    if is_orthogonal(flags.word("optimizer") or ""):
        chosen["use-distributed-optimizer"] = ("false",)
    is_half = flags.word("torch_dtype") == "float16" or flags.is_on("fp16")
    for name in ("bf16", "fp16"):
        chosen.pop(name, None)
    return chosen | {"fp16" if is_half else "bf16": ()}


def _owned(said: str) -> str:
    """Return a message about Megatron-LM's flags in ms-swift's words."""
    for name, (off, _) in table.OFF.items():
        said = said.replace(f"--{off}", f"--{name} false")
    return re.sub(r"--[a-z][a-z0-9-]+", lambda match: table.own_flag(match.group()), said)


def _remarks(flags: Flags) -> Iterator[str]:
    if not _is_packed(flags):
        yield (
            "no --packing: samples are as long as they are; the price is of steps whose samples all"
            " have --max_length tokens"
        )
    else:
        yield PACKED
    unknown = [name for name in flags.values if name not in table.NAMES]
    listed = [f"--{shown_value(name)[1:-1]}" for name in unknown if not table.megatron_flag(name)]
    if listed:
        yield f"no flag of {table.RELEASE} that is known here: {', '.join(listed[:8])}"
    if "task_type" in flags.values and flags.word("task_type") != "causal_lm":
        yield f"{flags.said('task_type')} is priced with a head over the vocabulary"
