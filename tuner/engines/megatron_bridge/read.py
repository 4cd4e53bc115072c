"""Megatron-Bridge's overrides as `LaunchSettings`: lines `section.field=value`, and the precision.

The precision is no override; the Python program beside them sets it in a line with
`get_mixed_precision_config("bf16_with_mxfp8_mixed")`. What neither says is the recipe's, of which
only what the price depends on and all recipes share is known (`RECIPE` of megatron_lm/flags.py).

Not covered: recipes themselves, which are programs; what they resolve to is read (container.py).
"""

import re
from typing import Final

from tuner.engines.megatron_bridge.container import container_values
from tuner.engines.megatron_lm import flags as table
from tuner.engines.megatron_lm.read import over_recipe, settings_of
from tuner.engines.reading.arguments import Flags
from tuner.engines.reading.launch import LaunchSettings
from tuner.errors import SpecError
from tuner.spec.files import shown_value
from tuner.spec.yaml_text import parse_yaml

_MARK: Final = re.compile(r"^_target_: megatron\.bridge\.[\w.]*ConfigContainer\b", re.MULTILINE)
_LINE: Final = re.compile(r"([a-z_]+)\.([a-z_.]+)=(.*)")
_SECTIONS: Final = frozenset({"model", "train", "ddp", "dist", "optimizer", "checkpoint"})
"""Sections of Bridge's configuration whose fields are Megatron-LM's flags."""
_PRECISION: Final = re.compile(r"get_mixed_precision_config\(\s*[\"']([\w]{1,80})[\"']")
_GRADIENTS: Final = re.compile(r"grad_reduce_in_fp32\s*=\s*(True|False)\b")
_PACKS: Final = re.compile(r"packed_sequence_size\b.*=\s*\S|enable_offline_packing=[Tt]rue")
_RECIPES: Final = {
    "bf16_with_fp8_delayed_scaling_mixed": "delayed",
    "bf16_with_fp8_current_scaling_mixed": "tensorwise",
    "bf16_with_fp8_subchannel_scaling_mixed": "blockwise",
    "bf16_with_mxfp8_mixed": "mxfp8",
}
"""Bridge's precisions with 8-bit GEMMs: Megatron-LM's name of the recipe."""
_FOLDER: Final = "nemo_experiments/default/checkpoints"
"""Default folder of the checkpoints of recipes."""
_SPELLED: Final = {
    **{field: f"--{name}" for field, name in table.SPELLED.items()},
    "kept_checkpoints": "checkpoint.most_recent_k",
}
_RENAMED: Final = {"gated-linear-unit": "swiglu"}
"""Fields that are flags of another name, without being the same for every engine."""


def read(text: str, *, source: str, program: str = "") -> LaunchSettings:
    """Read overrides, and the precision out of the text of the program that applies them.

    Raises:
        SpecError: a line is no override, or two of them disagree.
    """
    values: dict[str, tuple[str, ...]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line.strip())
        if match is None:
            if "=" in line:
                # A whole section, such as comm_overlap=null.
                continue
            raise SpecError(
                f"{source}: line {number}: {shown_value(line)} is no override; they read"
                " section.field=value"
            )
        section, field, value = match.groups()
        name = field.replace("_", "-")
        if section not in _SECTIONS or value == "null":
            continue
        name = _RENAMED.get(name, name)
        words = _words(value)
        if name in values and values[name] != words:
            raise SpecError(f"{source}: {field} is given twice, with different values; keep one")
        values[name] = words
    if not table.KNOWN & set(values):
        raise SpecError(f"{source}: no override such as model.tensor_model_parallel_size=8")
    values |= _implied(values)
    values = over_recipe(values | _precision(program))
    read_settings = settings_of(Flags(source=source, values=values, notes=_notes(program)))
    is_packed = _PACKS.search(f"{text}\n{program}") and "packed_sequence_specs=null" not in text
    packing = "first_fit_shuffle" if is_packed else ""
    return read_settings.model_copy(update={"spelled": _SPELLED, "packing": packing})


def holds_container(text: str) -> bool:
    """Return whether a text is a resolved configuration."""
    return _MARK.search(text) is not None


def read_container(text: str, *, source: str) -> LaunchSettings:
    """Read a resolved configuration.

    Raises:
        SpecError: not plain YAML, or a setting that cannot be read.
    """
    raw = parse_yaml(text, source=source)
    raw = raw if isinstance(raw, dict) else {}
    values = container_values(raw, source=source)
    if isinstance(raw.get("mixed_precision"), str):
        values |= _precision(f'get_mixed_precision_config("{raw["mixed_precision"]}")')
    values = {_RENAMED.get(name, name): words for name, words in values.items()}
    implied = _implied(values)
    if "save" not in values:
        del implied["save"]
    given = Flags(source=source, values=values | implied, notes=())
    update = {"spelled": _SPELLED, "deprecated": (), "packing": _packing(raw.get("dataset"))}
    return settings_of(given).model_copy(update=update)


def _packing(dataset: object) -> str:
    """Name the rule by which a data set is packed: by the keys of v0.5.0, or of v0.6.0."""
    for name in ("packed_sequence_specs", "offline_packing_specs"):
        specs = dataset.get(name) if isinstance(dataset, dict) else None
        size = specs.get("packed_sequence_size") if isinstance(specs, dict) else None
        if isinstance(size, int) and size > 0:
            return "first_fit_shuffle"
    return ""


def _words(value: str) -> tuple[str, ...]:
    if value.startswith("[") and value.endswith("]"):
        return tuple(word.strip() for word in value[1:-1].split(",") if word.strip())
    return (value.strip("'\""),)


def _implied(values: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Return the flags that a field implies, and the defaults that all recipes share."""
    implied: dict[str, tuple[str, ...]] = {}
    if "num-query-groups" in values:
        implied["group-query-attention"] = ()
    if "share-embeddings-and-output-weights" in values:
        shared = values["share-embeddings-and-output-weights"] == ("true",)
        implied["untie-embeddings-and-output-weights"] = ("false",) if shared else ()
    for name in ("moe-layer-freq", "linear-attention-freq"):
        if len(values.get(name, ())) > 1:
            implied[name] = (f"[{','.join(values[name])}]",)
    if "pipeline-model-parallel-layout" in values:
        # Bridge takes both; the layout says how many stages a rank has.
        values.pop("virtual-pipeline-model-parallel-size", None)
    implied["cross-entropy-fusion-impl"] = values.get("cross-entropy-fusion-impl", ("te",))
    implied["cross-entropy-loss-fusion"] = values.get("cross-entropy-loss-fusion", ())
    # Defaults of Bridge's recipes and of its CheckpointConfig (v0.5.0).
    implied["save"] = values.get("save", (_FOLDER,))
    implied["use-persistent-ckpt-worker"] = values.get("use-persistent-ckpt-worker", ())
    return implied


def _precision(program: str) -> dict[str, tuple[str, ...]]:
    flags: dict[str, tuple[str, ...]] = {"bf16": ()}
    named = _PRECISION.search(program)
    if named and named.group(1) in _RECIPES:
        flags |= {"fp8-format": ("hybrid",), "fp8-recipe": (_RECIPES[named.group(1)],)}
    if named and "nvfp4" in named.group(1):
        flags["fp4-format"] = ("e2m1",)
    gradients = _GRADIENTS.search(program)
    if gradients and gradients.group(1) == "False":
        flags["grad-reduce-in-bf16"] = ()
    return flags


def _notes(program: str) -> tuple[str, ...]:
    if _PRECISION.search(program):
        return ()
    return ("neither the overrides nor a program beside them set a precision: bf16 is assumed",)
