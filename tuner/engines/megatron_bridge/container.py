"""Megatron-Bridge's resolved `ConfigContainer`: what a dry run of a recipe writes as YAML.

`--dryrun` of scripts/performance and scripts/training writes ConfigContainer.yaml, every run prints
it, and checkpoints hold it as run_config.yaml (v0.6.0). Every field is said, so that nothing is a
recipe's: null is off. A field of several sections is taken from the first that says it, in the
order in which Bridge lets one override another before it trains (`runtime_config_update` of
training/config.py). Types and enumerations are `_target_` with their arguments.

Not covered: adapters, processes outside the container (nodes and devices are the spec's).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from tuner.engines.megatron_lm import flags as table
from tuner.errors import SpecError
from tuner.spec.files import shown_value

_ORDER: Final = (
    *("comm_overlap", "mixed_precision", "ddp", "dist"),
    *("dataset", "train", "model", "optimizer", "checkpoint"),
)
"""Sections whose fields are Megatron-LM's flags."""
_LENGTHS: Final = ("seq_length", "sequence_length")
"""What the price depends on of the dataset, which the model's length follows."""
_BACKENDS: Final = {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}
"""Megatron-Core's AttnBackend (transformer/enums.py)."""
_STAGE_LETTERS: Final = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Layers of a pipeline's layout, in lists: their letters as text."""
_ALSO: Final = ("gated-linear-unit", "share-embeddings-and-output-weights", "save", "fp8", "fp4")
"""Fields beside those of the table."""


def container_values(raw: Mapping[str, Any], *, source: str) -> dict[str, tuple[str, ...]]:
    """Return a resolved configuration as Megatron-LM's flags, without those that nothing reads.

    Raises:
        SpecError: adapters are trained, or a layout of stages cannot be read.
    """
    if raw.get("peft"):
        raise SpecError(
            f"{source}: peft: adapters of Megatron-Bridge are not read; say peft: null to price"
            " full training, or state goal.tune in a spec and run moetune plan"
        )
    values: dict[str, tuple[str, ...]] = {}
    for section in _ORDER:
        own = raw.get(section)
        for field, value in own.items() if isinstance(own, dict) else ():
            name = str(field).replace("_", "-")
            if (section == "dataset" and field not in _LENGTHS) or value is None:
                continue
            name = "seq-length" if section == "dataset" else name
            # Old fields are there, but off.
            if name in values or not _is_read(name) or (name in table.DEPRECATED and not value):
                continue
            if words := tuple(_words(name, value, source=source)):
                values[name] = words
    return values


def _is_read(name: str) -> bool:
    return name in table.KNOWN | {*table.OFF_FLAGS, *_ALSO}


def _words(name: str, value: Any, *, source: str) -> Iterator[str]:
    if name == "pipeline-model-parallel-layout" and not isinstance(value, str):
        yield _layout(value, source=source)
    elif isinstance(value, list):
        yield from (str(part) for part in value if not isinstance(part, dict))
    elif isinstance(value, bool):
        yield str(value).lower()
    elif not isinstance(value, dict):
        yield str(value)
    elif name == "attention-backend":
        yield _BACKENDS.get(next(iter(value.get("_args_") or ()), 0), "auto")
    elif value.get("_target_"):
        yield str(value["_target_"]).rpartition(".")[2]


def _layout(value: Any, *, source: str) -> str:
    stages = value if isinstance(value, list) else [value]
    try:
        return "|".join("".join(_STAGE_LETTERS[layer] for layer in stage) for stage in stages)
    except (KeyError, TypeError):
        raise SpecError(
            f"{source}: model.pipeline_model_parallel_layout {shown_value(value)} is no list of"
            f" stages of {', '.join(_STAGE_LETTERS)}; write it as text, such as Et*3|t*4L"
        ) from None
