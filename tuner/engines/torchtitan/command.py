"""torchtitan 0.3's command, `-m torchtitan.train --module M --config C`, as sections of its TOML.

C is a Python function of M that returns a configuration. The command's own `--section.key value`
override what M's file beside the launch says of it (config_registry.py), or else what `CONFIGS`
knows of the configurations that the release ships. Values are written as
its parser (tyro) takes them: hyphens for underscores, switches without a value and with `no-`
before their name, `activation-checkpoint:full` for a choice.

Batches are counted in sequences up to release 0.3 and in tokens after it.

Read from the package torchtitan 0.3.0, config/manager.py and the models' config_registry.py, and
from its repository of August 2026, config/configs.py.
"""

import copy
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tuner.engines.reading.arguments import launched_devices
from tuner.engines.reading.shell_words import Command, ShellText, shell_text
from tuner.engines.torchtitan.config_registry import registered_sections, registry_paths
from tuner.errors import SpecError
from tuner.spec.files import shown_value

PROGRAM: Final = "torchtitan.train"
_SAID: Final = re.compile(r"^(?![ \t]*#).*\btorchtitan\.train\b", re.MULTILINE)
_CHECKPOINT: Final = re.compile(r"activation[-_]checkpoint:([\w-]{1,40})")
_NUMBER: Final = re.compile(r"-?\d{1,12}")
_REAL: Final = re.compile(r"-?\d{1,12}\.\d{0,12}")
_TRUTHS: Final[Mapping[str, bool | None]] = {"true": True, "false": False, "none": None}

Keys = dict[str, Any]
_LISTS: Final = ("components", "converters", "filter_fqns", "fqns")
"""Keys whose values a command joins by commas (config/manager.py of 0.1 and 0.2)."""
_SELECTIVE: Final[Keys] = {"mode": "selective", "selective_ac_option": "op"}
_FULL: Final[Keys] = {"mode": "full"}
_MODES: Final[Mapping[str, Keys]] = {
    "none": {"mode": "none"},
    "selective": _SELECTIVE,
    "full": _FULL,
    "memory-budget": {"mode": "memory_budget"},
}


def _config(
    name: str,
    flavor: str,
    *,
    checkpoint: Keys,
    training: Keys,
    parallelism: Keys | None = None,
    **model: Any,
) -> Mapping[str, Keys]:
    return {
        "model": {"name": name, "flavor": flavor, **model},
        "training": {"disable_cuda_graphs": False, **training},
        "parallelism": parallelism or {},
        "activation_checkpoint": checkpoint,
    }


def _in_8_bits(plain: Mapping[str, Keys], converter: str) -> Mapping[str, Keys]:
    """Return a configuration with 8-bit GEMMs; float8 has the one recipe, by rows."""
    sections = {**plain, "model": plain["model"] | {"converters": [converter]}}
    if converter == "float8":
        sections["quantize"] = {"linear": {"float8": {"recipe_name": "rowwise"}}}
    return sections


_DEEPSEEK: Final[Keys] = {"local_batch_size": 4, "seq_len": 4096}
_INTERLEAVED: Final = "Interleaved1F1B"
_LLAMA_8B: Final = _config(
    "llama3", "8B", checkpoint=_SELECTIVE, training={"local_batch_size": 1, "seq_len": 8192}
)
_LLAMA_405B: Final = _config(
    "llama3",
    "405B",
    checkpoint=_FULL,
    training={"local_batch_size": 2, "seq_len": 8192},
    parallelism={"tensor_parallel_degree": 8},
)
_DEEPSEEK_671B: Final = _config(
    "deepseek_v3",
    "671B",
    checkpoint=_SELECTIVE,
    training=_DEEPSEEK | {"disable_cuda_graphs": True},
    parallelism={"pipeline_parallel_schedule": _INTERLEAVED, "expert_parallel_degree": 2},
)
CONFIGS: Final[Mapping[str, Mapping[str, Keys]]] = {
    "llama3_8b": _LLAMA_8B,
    "llama3_8b_mxfp8": _in_8_bits(_LLAMA_8B, "mx"),
    "llama3_70b": _config(
        "llama3",
        "70B",
        checkpoint=_FULL,
        training={"seq_len": 8192},
        parallelism={"tensor_parallel_degree": 8},
    ),
    "llama3_405b": {
        **_in_8_bits(_LLAMA_405B, "float8"),
        "compile": {"enable": True, "enable_async_tensor_parallel": True},
    },
    "deepseek_v3_16b": _config(
        "deepseek_v3",
        "16B",
        checkpoint=_SELECTIVE,
        training=_DEEPSEEK | {"disable_cuda_graphs": True},
        parallelism={"pipeline_parallel_schedule": _INTERLEAVED, "expert_parallel_degree": 8},
    ),
    "deepseek_v3_16b_hybridep": _config(
        "deepseek_v3",
        "16B",
        checkpoint=_SELECTIVE,
        training=_DEEPSEEK,
        parallelism={"pipeline_parallel_schedule": _INTERLEAVED, "expert_parallel_degree": 8},
        moe_comm_backend="hybridep",
        non_blocking_capacity_factor=1.0,
    ),
    "deepseek_v3_671b": _DEEPSEEK_671B,
    "deepseek_v3_671b_float8": _in_8_bits(_DEEPSEEK_671B, "float8"),
    "qwen3_14b": _config(
        "qwen3", "14B", checkpoint=_FULL, training={"local_batch_size": 4, "seq_len": 4096}
    ),
    "qwen3_32b": _config(
        "qwen3", "32B", checkpoint=_FULL, training={"local_batch_size": 2, "seq_len": 4096}
    ),
    "qwen3_30b_a3b": _config(
        "qwen3", "30B-A3B", checkpoint=_FULL, training={"local_batch_size": 2, "seq_len": 4096}
    ),
    "gpt_oss_20b": _config(
        "gpt_oss", "20b", checkpoint=_FULL, training={"local_batch_size": 1, "seq_len": 8192}
    ),
    "gpt_oss_120b": _config(
        "gpt_oss", "120b", checkpoint=_FULL, training={"local_batch_size": 1, "seq_len": 8192}
    ),
}
"""Configurations by function: the keys that a prediction uses and that differ from the release's
defaults."""
_UNKNOWN: Final[Mapping[str, Keys]] = {
    "model": {},
    "training": {"disable_cuda_graphs": False},
    "parallelism": {},
    "activation_checkpoint": _SELECTIVE,
}


_IN_TOKENS: Final[Mapping[str, str]] = {
    "num_tokens_per_microbatch_per_dp_rank": "local_batch_size",
    "num_tokens_per_train_step": "global_batch_size",
}
"""Sizes in tokens: those in sequences that they stand for."""
RUN_SCRIPT: Final = "run_train.sh"
"""The script of torchtitan's repository that starts a training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCommand:
    """A command that starts torchtitan."""

    sections: Mapping[str, Keys]
    """Settings as the sections of a TOML file would hold them."""
    devices: Mapping[str, int]
    """`devices` and `devices_per_node`, where the launcher states both."""
    is_known: bool = True
    """The configuration's settings are known, from the launch's files or from `CONFIGS`."""
    notes: tuple[str, ...] = ()


def run_script(environment: Mapping[str, str]) -> str:
    """Return what the script of torchtitan's repository runs, where the launch has no such file.

    Its variables are CONFIG_FILE up to release 0.2, MODULE and CONFIG from 0.3 on.
    """
    config = "--module $MODULE --config $CONFIG"
    if "MODULE" not in environment:
        config = "--job.config_file $CONFIG_FILE"
    return f'torchrun --nproc_per_node=${{NGPU:-8}} -m {PROGRAM} {config} "$@"'


def is_training_command(words: Sequence[str]) -> bool:
    """Say whether a command runs torchtitan's own program with a configuration of release 0.3."""
    starts = itertools.pairwise(words)
    return ("-m", PROGRAM) in starts and not any(word.startswith("--job.config") for word in words)


def read_training_command(
    text: str, *, source: str, beside: Callable[[str], str | None] = lambda _: None
) -> TrainingCommand | None:
    """Read the command of a text that starts torchtitan; None where none does.

    Args:
        text: of the script or the command.
        source: what messages call it.
        beside: the text of a file of torchtitan's repository, None where there is none.

    Raises:
        SpecError: no shell text, several starts, or one whose configuration is not named.
    """
    if _SAID.search(text) is None:
        return None
    shell = shell_text(text, source=source)
    commands = [command for command in shell.commands if is_training_command(command.words)]
    if not commands:
        return None
    if len(commands) > 1:
        raise SpecError(
            f"{source}: starts torchtitan {len(commands)} times; estimate one at a time"
        )
    nodes, per_node = launched_devices(commands[0].words, shell.scheduler)
    devices = {}
    if nodes and per_node:
        devices = {"devices": nodes * per_node, "devices_per_node": per_node}
    sections, is_known, notes = _stated(commands[0], beside, source=source)
    return TrainingCommand(
        sections=sections,
        devices=devices,
        is_known=is_known,
        notes=(*notes, *command_notes(shell, commands[0])),
    )


def command_notes(shell: ShellText, command: Command) -> tuple[str, ...]:
    """Return notes on what only a running shell knows of a command."""
    notes = [
        f"not set in the file, so its default counts: {default[:80]}"
        for default in shell.defaults
        if default.partition("=")[2] in command.words
    ]
    if command.is_conditional:
        notes.append("torchtitan starts inside a condition; it was read as if that held")
    return tuple(notes)


def _stated(
    command: Command, beside: Callable[[str], str | None], *, source: str
) -> tuple[Mapping[str, Keys], bool, tuple[str, ...]]:
    words = command.words[command.words.index(PROGRAM) + 1 :]
    flags = list(_flags(words))
    config = next((value for name, value in flags if name == "config"), None)
    if not config or config.startswith("$"):
        said = f"--config {config} has no value here" if config else "--config is missing"
        raise SpecError(
            f"{source}: {said}: the function of --module that returns the configuration, such as"
            " --module llama3 --config llama3_8b"
        )
    module = dict(flags).get("module") or ""
    files = filter(None, map(beside, registry_paths(module)))
    read = (registered_sections(text, module=module, name=config) for text in files)
    base = next(filter(None, read), None) or CONFIGS.get(config)
    sections = copy.deepcopy(dict(base or _UNKNOWN))
    for word in words:
        if match := _CHECKPOINT.fullmatch(word):
            if match[1] not in _MODES:
                raise SpecError(
                    f"{source}: {shown_value(word)} is none of"
                    f" {', '.join(f'activation-checkpoint:{mode}' for mode in _MODES)}"
                )
            sections["activation_checkpoint"] = dict(_MODES[match[1]])
    _override(sections, flags, source=source)
    _count_sequences(sections, source=source)
    unknown = (
        f"what {shown_value(config)} sets is not known here, no config_registry.py of --module lies"
        " beside the launch: torchtitan's defaults count, and the spec's batch and sequence"
    )
    written = {section: keys for section, keys in sections.items() if keys}
    return written, base is not None, () if base is not None else (unknown,)


def _count_sequences(sections: Keys, *, source: str) -> None:
    """Turn sizes in tokens, of releases after 0.3, into the sequences of those before.

    Raises:
        SpecError: tokens that are no whole number of sequences.
    """
    training = sections.get("training", {})
    if "max_context_length" in training:
        training["seq_len"] = training.pop("max_context_length")
    length = training.get("seq_len", 2048)
    for current, former in _IN_TOKENS.items():
        tokens = training.pop(current, -1)
        if tokens == -1:
            continue
        if not (type(tokens) is int and type(length) is int and length > 0) or tokens % length:
            raise SpecError(
                f"{source}: training.{current} {shown_value(tokens)} is no multiple of"
                f" training.max_context_length {shown_value(length)}; give one that is"
            )
        training[former] = tokens // length
    count = sections.get("parallelism", {}).get("num_pp_microbatches")
    if type(count) is int and type(training.get("local_batch_size")) is int:
        sections["parallelism"]["pipeline_parallel_microbatch_size"] = training["local_batch_size"]
        training["local_batch_size"] *= count


def overridden(sections: Keys, words: Sequence[str], *, source: str) -> Keys:
    """Return the sections of a TOML under the `--section.key value` of the command that names it.

    Raises:
        SpecError: a flag of a section that is none.
    """
    merged = copy.deepcopy(sections)
    flags = [flag for flag in _flags(words) if not flag[0].startswith("job.")]
    _override(merged, flags, source=source)
    return merged


def _override(sections: Keys, flags: Iterable[tuple[str, str | None]], *, source: str) -> None:
    for name, text in flags:
        section, _, key = name.replace("-", "_").rpartition(".")
        if not section:
            continue
        is_on = not (text is None and key.startswith("no_"))
        key = key if is_on or text is not None else key.removeprefix("no_")
        keys: Keys = sections
        for part in section.split("."):
            keys = keys.setdefault(part, {})
            if not isinstance(keys, dict):
                raise SpecError(f"{source}: --{name}: {part} is no section")
        keys[key] = is_on if text is None else _value(text)
        if key in _LISTS and isinstance(text, str):
            keys[key] = [entry.strip() for entry in text.split(",") if entry.strip()]


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield flags with their value; None: a switch."""
    for at, word in enumerate(words):
        name, is_joined, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            continue
        after = words[at + 1] if at + 1 < len(words) else "--"
        is_switch = after.startswith(("--", "$@", "${@}")) or _CHECKPOINT.fullmatch(after)
        if is_joined:
            yield name, value
        else:
            yield name, None if is_switch else after


def _value(text: str) -> bool | int | float | str | None:
    if text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    if _NUMBER.fullmatch(text):
        return int(text)
    return float(text) if _REAL.fullmatch(text) else text
