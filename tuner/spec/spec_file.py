"""Reader of a spec's YAML, for any goal: to a validated record, or a refusal of one line."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from profilers.records import Record
from tuner.errors import SpecError
from tuner.spec.complaint import complaint, field_path
from tuner.spec.fields import SpecFolder
from tuner.spec.files import read_small_text, shown_path, shown_value
from tuner.spec.yaml_text import parse_yaml

File = TypeVar("File", bound=Record)
Truth = tuple[tuple[str | int, ...], bool]
Keys = dict[str, Any]
"""Keys with values, e.g. of a YAML file."""


def read_spec_keys(path: Path) -> Keys:
    """Read the keys of a spec.

    Raises:
        SpecError: the file is unreadable, no YAML, or no mapping.
    """
    source = shown_path(path)
    raw = parse_yaml(read_small_text(path, what="spec"), source=source)
    if not isinstance(raw, dict):
        shown = "nothing" if raw is None else shown_value(raw)
        raise SpecError(f"{source}: {shown} at the top, where the keys of a spec belong")
    return raw


def validate_spec(raw: Keys, path: Path, kind: type[File]) -> File:
    """Validate the keys against one kind of spec; paths become relative to the file's folder.

    Raises:
        SpecError: the file, the field's path, its value, the rule.
    """
    try:
        spec = kind.model_validate(raw, context=SpecFolder(folder=path.parent))
    except ValidationError as error:
        raise SpecError(f"{shown_path(path)}: {complaint(error, model=kind)}") from error
    for location, value in _truths(raw, spec):
        raise SpecError(
            f"{shown_path(path)}: {field_path(location)}: {shown_value(value)} is not a number"
        )
    return spec


def _truths(raw: Any, made: Any, location: tuple[str | int, ...] = ()) -> Iterator[Truth]:
    """Find booleans that pydantic accepted as numbers."""
    if isinstance(raw, bool) and isinstance(made, int | float) and not isinstance(made, bool):
        yield location, raw
    elif isinstance(raw, dict):
        for key, value in raw.items():
            inner = made.get(key) if isinstance(made, dict) else getattr(made, str(key), None)
            yield from _truths(value, inner, (*location, key))
    elif isinstance(raw, list) and isinstance(made, list | tuple) and len(raw) == len(made):
        for number, value in enumerate(raw):
            yield from _truths(value, made[number], (*location, number))
    elif isinstance(made, tuple) and len(made) == 1:
        # A single value may be written without brackets.
        yield from _truths(raw, made[0], location)
