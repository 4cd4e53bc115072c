"""Arguments of Transformers' Trainer, of LLaMA-Factory, TRL and ms-swift, as they are typed.

    torchrun ... train.py --per_device_train_batch_size 1 --bf16 True --deepspeed zero2.json
    llamafactory-cli train train.yaml learning_rate=1e-5
    accelerate launch --config_file fsdp.yaml sft.py --config sft.yaml
    trl sft --accelerate_config zero3 --model_name_or_path ...
    NPROC_PER_NODE=8 swift sft --deepspeed zero3 --model ...

Argument classes and defaults were read from the packages transformers 5.24.0 (training_args.py),
llamafactory 0.9.5 (hparams/, launcher.py), trl 1.16.0 (trainer/sft_config.py, base_config.py,
model_config.py, cli/) and ms-swift 4.6.0 (swift/arguments, swift/trainers/arguments.py, cli/).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, Final

from tuner.engines.ms_swift.command import swift_command
from tuner.engines.reading.options_file import Beside
from tuner.engines.reading.shell_words import Command
from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.yaml_text import parse_yaml

_TRUTHS: Final[Mapping[str, bool | None]] = {
    "true": True,
    "yes": True,
    "false": False,
    "no": False,
    "null": None,
    "none": None,
}
_CONFIGS: Final = (".yaml", ".yml", ".json")
_LAUNCHER_MODULES: Final = ("torch.distributed.run", "torch.distributed.launch", "deepspeed")
_FACTORY_COMMANDS: Final = ("llamafactory-cli", "lmf")
_SFT_SCRIPT: Final = re.compile(r"(run_)?sft(_\w+)?\.py|\w+_sft\.py")
_MORE_MODELS: Final = re.compile(
    r"(.*_)?(dpo|grpo|gspo|ppo|kto|orpo|cpo|rloo|xpo|tpo|gkd|prm|rm|reward\w*|bco|nash|gold|minillm"
    r"|distill\w*|rlhf|sdft|sdpo|ssd)(_.*)?"
)
"""Scripts of preference tuning, reinforcement learning and distillation."""
_MARKS: Final = frozenset({"per_device_train_batch_size", "deepspeed", "deepspeed_config", "fsdp"})
"""Arguments that only the Trainer's programs have; Megatron-LM's are told apart by `_OTHERS`."""
_SFT_MARKS: Final = frozenset({"config", "model_name_or_path", "dataset_name"})
_OTHERS: Final = frozenset({"micro_batch_size", "global_batch_size", "tensor_model_parallel_size"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerProgram:
    """One program on top of Transformers' Trainer."""

    name: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    sequence: tuple[str, ...]
    """Arguments that hold the longest sequence, the first that is set counts."""


_BATCH: Final = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
FACTORY: Final = TrainerProgram(
    name="LLaMA-Factory",
    defaults={
        **_BATCH,
        "cutoff_len": 2048,
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_target": "all",
    },
    sequence=("cutoff_len",),
)
TRL: Final = TrainerProgram(
    name="TRL",
    defaults={
        **_BATCH,
        "max_length": 1024,
        "gradient_checkpointing": True,
        "dtype": "float32",
        "lora_r": 16,
        "lora_target_modules": ["q_proj", "v_proj"],
    },
    sequence=("max_seq_length", "max_length"),
)
SWIFT: Final = TrainerProgram(
    name="ms-swift",
    defaults={
        "per_device_train_batch_size": 1,
        "gradient_checkpointing": True,
        "torch_dtype": "bfloat16",
        "tuner_type": "lora",
        "lora_rank": 8,
        "target_modules": "all-linear",
    },
    sequence=("packing_length", "max_length"),
)
"""ms-swift: accumulation follows from the devices; the type is that of the checkpoint."""
SWIFT_COMMAND: Final = "swift"
_SEQUENCE: Final = (
    "model_max_length",
    "max_seq_length",
    "max_seq_len",
    "max_length",
    "cutoff_len",
    "seq_length",
    "block_size",
)
TRAINER: Final = TrainerProgram(
    name="Transformers' Trainer",
    defaults=_BATCH,
    sequence=_SEQUENCE,
)
OWN_LOOP: Final = TrainerProgram(name="a program of its own", sequence=_SEQUENCE)
"""Calls deepspeed.initialize itself, so that nothing fills in `"auto"`."""
_NAMES: Final = {"trl": TRL.name, **dict.fromkeys(_FACTORY_COMMANDS, FACTORY.name)}
"""Programs by their command."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerCommand:
    """The words of one command: those of its launcher, and the program with its arguments."""

    launcher: tuple[str, ...]
    script: str
    """A file, or the name of a command or module."""
    rest: tuple[str, ...]

    @property
    def name(self) -> str:
        """The script without its folder."""
        return PurePosixPath(self.script).name

    @property
    def launcher_flags(self) -> Mapping[str, Any]:
        """The flags before the script."""
        return dict(_flags(self.launcher))


def trainer_command(command: Command) -> TrainerCommand | None:
    """Split a command that starts the Trainer; None for all others."""
    words = command.words
    if swift := swift_command(words):
        if not swift.trains_with_transformers:
            return None
        return TrainerCommand(launcher=swift.launcher, script=SWIFT_COMMAND, rest=swift.arguments)
    start = next((at for at, word in enumerate(words) if _is_program(words, at, word)), None)
    if start is None:
        return None
    split = TrainerCommand(launcher=words[:start], script=words[start], rest=words[start + 1 :])
    if split.name in (*_FACTORY_COMMANDS, "trl"):
        return None if split.rest[:1] in (("vllm-serve",), ("env",), ("version",)) else split
    names = dict(_flags(split.rest)).keys()
    is_sft = _SFT_SCRIPT.fullmatch(split.name) is not None
    is_trainer = bool(names & (_MARKS | _SFT_MARKS if is_sft else _MARKS)) and not names & _OTHERS
    is_configured = _is_file(next(iter(split.rest), "")) and (is_sft or split.name == "train.py")
    return split if is_trainer or is_configured or "trl/scripts/" in split.script else None


def _is_file(word: str) -> bool:
    return word.endswith(_CONFIGS) and not word.startswith("-")


def argument_file_command(name: str, text: str) -> str | None:
    """Return the command that reads a file of arguments; None where it is none."""
    keys = set(re.findall(r"""^\s{0,4}["']?(\w+)["']?\s*:""", text, re.MULTILINE))
    if keys & {"tuner_type", "train_type"} or {"model", "max_length"} <= keys:
        return f"{SWIFT_COMMAND} sft {name}" if keys & _MARKS else None
    if "model_name_or_path" not in keys:
        return None
    if keys & {"stage", "finetuning_type", "template", "cutoff_len"}:
        return f"llamafactory-cli train {name}"
    return f"trl sft --config {name}"


def _is_program(words: Sequence[str], at: int, word: str) -> bool:
    if PurePosixPath(word).name in (*_FACTORY_COMMANDS, "trl"):
        return True
    is_module = at > 0 and words[at - 1] in ("-m", "--module")
    if is_module:
        return word not in _LAUNCHER_MODULES and not word.startswith("accelerate.")
    return word.endswith(".py") and not word.startswith("-")


def program_values(
    command: TrainerCommand, beside: Beside, *, source: str
) -> tuple[TrainerProgram, dict[str, Any]]:
    """Return the program and its arguments, those of its file of arguments included.

    Raises:
        SpecError: the file is missing, or the program trains in a way that is not read.
    """
    rest = list(command.rest)
    _check_subcommand(command, source=source)
    if command.name in (*_FACTORY_COMMANDS, "trl"):
        rest = rest[1:]
    typed = dict(_flags(rest))
    named = typed.pop("config", None)
    if rest and _is_file(rest[0]):
        named = rest[0]
        typed |= dict(_overrides(rest[1:]))
    values = _file_values(str(named), beside, command=command, source=source) if named else {}
    values |= typed
    return _program(command, values), values


def _program(command: TrainerCommand, values: Mapping[str, Any]) -> TrainerProgram:
    if command.script == SWIFT_COMMAND:
        return SWIFT
    is_factory = command.name in _FACTORY_COMMANDS or "finetuning_type" in values
    if is_factory or {"stage", "template"} <= values.keys():
        return FACTORY
    is_trl = command.name == "trl" or "trl/" in command.script or command.script.startswith("trl.")
    if is_trl or (_SFT_SCRIPT.fullmatch(command.name) and _is_trls(values)):
        return TRL
    return OWN_LOOP if "deepspeed_config" in values else TRAINER


def _is_trls(values: Mapping[str, Any]) -> bool:
    return bool({"dataset_name", "dataset_mixer", "dataset_mixture", "use_peft"} & values.keys())


def _check_subcommand(command: TrainerCommand, *, source: str) -> None:
    """Refuse what trains nothing, or in a way that is not priced."""
    wanted = {"llamafactory-cli": "train", "lmf": "train", "trl": "sft"}.get(command.name)
    first = next(iter(command.rest), "")
    if wanted is not None and first != wanted:
        raise SpecError(
            f"{source}: {_NAMES[command.name]}'s {command.name} {shown_value(first)} is not priced;"
            f" only {command.name} {wanted} is"
        )
    if wanted is None and _MORE_MODELS.fullmatch(command.name.removesuffix(".py")):
        raise SpecError(
            f"{source}: {shown_value(command.script)} is not priced, supervised fine-tuning (sft)"
            " is: more than one model takes part in it"
        )


def _file_values(
    named: str, beside: Beside, *, command: TrainerCommand, source: str
) -> dict[str, Any]:
    by = _NAMES.get(command.name, command.name)
    text = found_text(named, beside, by=by, source=source)
    mapping = parse_yaml(text, source=PurePosixPath(named).name)
    if not isinstance(mapping, dict):
        raise SpecError(f"{source}: {shown_value(named)} holds no arguments of {command.name}")
    return mapping


def found_text(named: str, beside: Beside, *, by: str, source: str) -> str:
    """Return the text of a file that a launch names, where it names it or beside the launch.

    Raises:
        SpecError: it is in neither place.
    """
    last = PurePosixPath(named).name
    texts = (beside(name) for name in (named, last, f"../{named}", f"../{last}"))
    text = next((content for content in texts if content is not None), None)
    if text is None:
        raise SpecError(
            f"{source}: {shown_value(named)}, which {by} reads, is not here: put "
            f"{last} beside the launch"
        )
    return text


def _flags(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield `--name value`, `--name=value` and switches; several values become a list."""
    name, values = "", list[str]()
    for word in (*words, "--"):
        if word in ("$@", "${@}", "$*"):
            continue
        if not word.startswith("--"):
            values.append(word)
            continue
        if name:
            yield name, _typed(values)
        name, joined, value = word.removeprefix("--").partition("=")
        name, values = name.replace("-", "_"), [value] if joined else []


def _overrides(words: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield `name=value`, as OmegaConf reads a command line."""
    for word in words:
        name, is_joined, value = word.lstrip("-").partition("=")
        if is_joined:
            yield name, _typed([value])


def _typed(values: Sequence[str]) -> Any:
    if len(values) != 1:
        return list(values) or True
    text = values[0]
    if text.lower() in _TRUTHS:
        return _TRUTHS[text.lower()]
    return int(text) if re.fullmatch(r"-?\d{1,12}", text) else text
