"""One line from a failed validation: the field's path, its value, the rule, the way out."""

import difflib
import typing
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from tuner.spec.files import one_line, shown_value


def complaint(error: ValidationError, *, model: type[BaseModel]) -> str:
    """Describe the first error, e.g. `goal.globl_batch_size: unknown key; did you mean ...?`.

    An unknown key comes before everything else, because a misspelt key also counts as missing.
    """
    details = error.errors()
    unknown = [detail for detail in details if detail["type"] == "extra_forbidden"]
    first = (unknown or details)[0]
    first["loc"] = tuple(part for part in first["loc"] if not _is_tag(part))
    field = field_path(first["loc"])
    return one_line(f"{field}: {_rule(first, model)}" if field else _rule(first, model))


def _is_tag(part: str | int) -> bool:
    """Return whether pydantic put a union's alternative here, written `<name>`, and no field."""
    return isinstance(part, str) and part.startswith("<") and part.endswith(">")


def field_path(location: Sequence[str | int]) -> str:
    """Write a location as a user would, e.g. `cluster.pools[0].nic`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
            continue
        name = part if part.isprintable() and len(part) <= 60 else shown_value(part)
        path += f".{name}" if path else name
    return path


def _rule(detail: ErrorDetails, model: type[BaseModel]) -> str:
    """Describe it in terms of YAML, or with pydantic's message after the value."""
    if detail["type"] == "extra_forbidden":
        return _unknown_key(detail["loc"], model)
    if detail["type"] == "missing":
        return "missing"
    if detail["type"] == "value_error":
        return str(detail.get("ctx", {}).get("error", detail["msg"]))
    if detail["type"] in ("model_type", "model_attributes_type"):
        return f"{shown_value(detail['input'])} where a mapping belongs"
    if detail["type"] == "too_short":
        return "an empty list; name at least one, or leave the key out"
    if detail["type"] in ("tuple_type", "list_type"):
        return f"{shown_value(detail['input'])} where a list belongs"
    return detail["msg"].replace("Input", shown_value(detail["input"]), 1)


def _unknown_key(location: Sequence[str | int], model: type[BaseModel]) -> str:
    known = list(_model_at(location[:-1], model).model_fields)
    near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.6)
    if near:
        return f"unknown key; did you mean {near[0]!r}?"
    return f"unknown key; known: {', '.join(known)}"


def _model_at(location: Sequence[str | int], model: type[BaseModel]) -> type[BaseModel]:
    """Follow field names from the outermost model to the one that a location lies in."""
    for part in location:
        if isinstance(part, str):
            model = _inner_model(model.model_fields[part].annotation) or model
    return model


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    """Find the model in `X | None`, `tuple[X, ...]` and the like."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_inner_model(argument) for argument in typing.get_args(annotation))
    return next((model for model in inner if model is not None), None)
