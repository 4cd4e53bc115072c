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

_ORDER: Final = (
    *("comm_overlap", "mixed_precision", "ddp", "dist"),
    *("dataset", "train", "model", "optimizer", "checkpoint"),
)
"""Sections whose fields are Megatron-LM's flags."""
_SLOW: Final = {"[3]": "unfused", "[4]": "local"}
"""Members of Megatron-Core's AttnBackend that are no flash attention (transformer/enums.py)."""
_LETTERS: Final = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
"""Layers of a pipeline's layout, in lists: their letters as text."""
_READ: Final = table.KNOWN | {
    *table.OFF_FLAGS,
    *("gated-linear-unit", "share-embeddings-and-output-weights", "save", "fp8", "fp4"),
}


def container_values(raw: Mapping[str, Any], *, source: str) -> dict[str, tuple[str, ...]]:
    """Return a resolved configuration as Megatron-LM's flags, without those that nothing reads.

    Raises:
        SpecError: adapters are trained.
    """
    if raw.get("peft"):
        raise SpecError(
            f"{source}: peft: adapters of Megatron-Bridge are not read; say peft: null to price"
            " full training, or state goal.tune in a spec and run moetune plan"
        )
    values: dict[str, tuple[str, ...]] = {}
    for section in _ORDER:
        settings = raw.get(section)
        for field, value in settings.items() if isinstance(settings, dict) else ():
            # The model's length follows the dataset's.
            name = str(field).replace("_", "-").replace("sequence-length", "seq-length")
            # Old fields are there, but off.
            is_off = value is None or (name in table.DEPRECATED and not value)
            if is_off or name in values or name not in _READ:
                continue
            if words := tuple(_words(name, value)):
                values[name] = words
    return values


def _words(name: str, value: Any) -> Iterator[str]:
    if name == "pipeline-model-parallel-layout" and isinstance(value, list):
        stages = (stage for stage in value if isinstance(stage, list))
        yield "|".join("".join(_LETTERS.get(str(layer), "?") for layer in s) for s in stages)
    elif isinstance(value, list):
        yield from (str(part) for part in value if not isinstance(part, dict))
    elif isinstance(value, bool):
        yield str(value).lower()
    elif not isinstance(value, dict):
        yield str(value)
    elif name == "attention-backend":
        yield _SLOW.get(str(value.get("_args_")), "auto")
    elif value.get("_target_"):
        yield str(value["_target_"]).rpartition(".")[2]
