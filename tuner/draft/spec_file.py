"""Turns field values into a spec that `moetune plan` accepts."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from profilers.errors import ProfilerError
from tuner.draft.spec_fields import FieldValues, Goal, SpecField, spec_fields
from tuner.draft.text import spec_text
from tuner.errors import SpecError, TunerError
from tuner.goals.train import refuse_unlaunchable
from tuner.spec.files import shown_path
from tuner.spec.place_read import read_place_spec
from tuner.spec.read import read_spec
from tuner.spec.serving.read import read_serve_spec


def fill_values(goal: Goal, given: Mapping[str, str]) -> dict[str, str]:
    """Return the values of every field of a goal, defaults filled in, all checked.

    Args:
        goal: what the spec is for.
        given: values by key.

    Raises:
        SpecError: one is unacceptable, one without default is missing, or one is unknown.
    """
    fields = spec_fields(goal)
    known = {field.key for field in fields}
    strange = [key for key in given if key not in known]
    if strange:
        raise SpecError(
            f"--{strange[0]} does not apply to a {goal!r} goal; its flags: "
            + ", ".join(f"--{key}" for key in sorted(known))
        )
    missing = [field.key for field in fields if field.default is None and not given.get(field.key)]
    if missing:
        raise SpecError(
            f"{', '.join(f'--{key}' for key in missing)} missing; a {goal!r} spec needs "
            + ", ".join(f"--{one.key}" for one in fields if one.default is None)
        )
    values: dict[str, str] = {}
    for field in fields:
        text = given.get(field.key) or default_value(field, {**given, **values}) or ""
        values[field.key] = checked_value(field, text, values)
    return values


def default_value(field: SpecField, known: FieldValues) -> str | None:
    """Return the default of a field, given the known values and flags.

    Raises:
        SpecError: none can be derived; the message names the flag.
    """
    try:
        return field.default_value(known)
    except TunerError as error:
        raise SpecError(f"--{field.key}: {error}") from error


def checked_value(field: SpecField, text: str, values: FieldValues) -> str:
    """Return a value, stripped; empty if the field may be left out.

    Raises:
        SpecError: it is unacceptable; the message names the flag.
    """
    value = text.strip()
    if not value and field.unless and not values.get(field.unless):
        raise SpecError(f"--{field.unless} or --{field.key} is missing; state one of them")
    if not value and field.default == "":
        return ""
    if not value:
        raise SpecError(f"--{field.key}: missing")
    try:
        field.check(value, values)
    except (TunerError, ProfilerError) as error:
        message = str(error)
        known = message.startswith("--")
        raise SpecError(message if known else f"--{field.key}: {message}") from error
    return value


def draft_spec(goal: Goal, values: FieldValues, *, folder: Path | None) -> str:
    """Return the text of a spec that `moetune plan` accepts.

    Args:
        goal: what it is for.
        values: as returned by `fill_values`.
        folder: that the file will lie in, which its paths are relative to; None: absolute paths.

    Raises:
        SpecError: the values contradict each other.
    """
    with temporary_spec(goal, values):
        return spec_text(goal, values, folder=folder)


@contextmanager
def temporary_spec(goal: Goal, values: FieldValues) -> Iterator[Path]:
    """Yield a temporary file with the spec; its paths are absolute.

    Raises:
        SpecError: the values contradict each other; the message does not name the file.
    """
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        path = Path(scratch) / "spec.yaml"
        path.write_text(spec_text(goal, values, folder=None), encoding="utf-8")
        try:
            _check(goal, path)
            yield path
        except TunerError as error:
            shown = str(error).replace(f"{shown_path(path)}: ", "").replace(f"{path}: ", "")
            raise type(error)(shown) from error


def _check(goal: Goal, path: Path) -> None:
    if goal == "serve":
        read_serve_spec(path)
    elif goal == "place":
        read_place_spec(path)
    else:
        refuse_unlaunchable(read_spec(path))
