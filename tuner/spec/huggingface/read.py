"""Reader of a Hugging Face `config.json`: from its path to a `ModelSpec`."""

import difflib
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from profilers.errors import first_problem
from tuner.errors import SpecError
from tuner.spec.files import read_json_object, shown_path, shown_value
from tuner.spec.huggingface.architectures import ARCHITECTURES
from tuner.spec.huggingface.fields import ConfigFields
from tuner.spec.huggingface.parts import vision_elements
from tuner.spec.huggingface.quantization import (
    int4_weight_bytes,
    released_cache,
    released_weights,
    unquantized_parts,
)
from tuner.spec.model import ModelSpec

_INSTEAD: Final = "give a dense decoder as LlamaForCausalLM of the same sizes; "
"""Advice in the refusal of an architecture that is not read."""


def read_model(path: Path) -> ModelSpec:
    """Read an unmodified `config.json`, named by its path or by its folder.

    Raises:
        SpecError: unreadable, no JSON object, an unknown architecture, or a field that is missing
            or impossible; one line that names file and field.
    """
    file = path / "config.json" if path.is_dir() else path
    source = shown_path(file)
    fields = ConfigFields(values=read_json_object(file, what="model config"), source=source)
    fields = replace(fields, architecture=_architecture(fields), name=_name(file, fields))
    try:
        model = ARCHITECTURES[fields.architecture](fields)
    except ValidationError as error:
        raise SpecError(f"{source}: {first_problem(error)}") from error
    return model.model_copy(
        update={
            "int4_bytes": int4_weight_bytes(fields.values),
            "released_cache": released_cache(fields.values),
            "vision_elements": vision_elements(fields, hidden=model.hidden_size),
            "released_weights": released_weights(fields.values),
            "unquantized": unquantized_parts(fields.values, layers=model.num_layers),
        }
    )


def _architecture(fields: ConfigFields) -> str:
    names = fields.typed_list("architectures", str)
    known = f"known: {', '.join(ARCHITECTURES)}"
    if not names:
        raise fields.refusal("architectures", f"missing; {known}")
    if names[0] not in ARCHITECTURES:
        near = difflib.get_close_matches(names[0], ARCHITECTURES, n=1, cutoff=0.9)
        # Another number is another architecture, not a typo.
        is_slip = bool(near) and re.sub(r"\D", "", near[0]) == re.sub(r"\D", "", names[0])
        hint = f"did you mean {near[0]!r}? " if is_slip else _INSTEAD
        raise fields.refusal(
            "architectures", f"{shown_value(names[0])} is not supported; {hint}{known}"
        )
    return str(names[0])


def _name(file: Path, fields: ConfigFields) -> str:
    """Name the model by its folder, by its file name if informative, or by its type."""
    if file.name != "config.json":
        return file.stem
    fallback = fields.text("model_type", default="") or str(fields.values["architectures"][0])
    return file.resolve().parent.name or fallback
