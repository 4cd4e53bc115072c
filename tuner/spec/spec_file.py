"""From a spec's YAML to a validated record, whatever its goal; refusals are one line."""

from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from profilers.records import Record
from tuner.errors import SpecError
from tuner.spec.complaint import complaint
from tuner.spec.fields import SpecFolder
from tuner.spec.files import read_small_text, shown_path, shown_value
from tuner.spec.yaml_text import parse_yaml

File = TypeVar("File", bound=Record)


def parsed_spec(path: Path) -> dict[str, Any]:
    """Read the keys of a spec.

    Raises:
        SpecError: the file is unreadable, no YAML, or no mapping.
    """
    source = shown_path(path)
    raw = parse_yaml(read_small_text(path, what="spec"), source=source)
    if not isinstance(raw, dict):
        found = "nothing" if raw is None else shown_value(raw)
        raise SpecError(f"{source}: {found} at the top, where the keys of a spec belong")
    return raw


def validated_spec(raw: dict[str, Any], path: Path, kind: type[File]) -> File:
    """Hold the keys to one kind of spec; paths become relative to the file's folder.

    Raises:
        SpecError: the file, the field's path, its value, the rule.
    """
    try:
        return kind.model_validate(raw, context=SpecFolder(folder=path.parent))
    except ValidationError as error:
        raise SpecError(f"{shown_path(path)}: {complaint(error, model=kind)}") from error
