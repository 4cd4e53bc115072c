"""Turns field values into a spec that `moetune plan` accepts."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from profilers.errors import ProfilerError
from tuner.draft.draft import Draft, FieldValues, SpecField
from tuner.errors import SpecError, TunerError
from tuner.spec.files import shown_path


def fill_values(draft: Draft, given: Mapping[str, str]) -> dict[str, str]:
    """Return the values of every field of a goal, defaults filled in, all checked.

    Args:
        draft: of the goal.
        given: values by key.

    Raises:
        SpecError: one is unacceptable, one without default is missing, or one is unknown.
    """
    known = {field.key for field in draft.fields}
    strange = [key for key in given if key not in known]
    if strange:
        raise SpecError(
            f"--{strange[0]} does not apply to a {draft.kind!r} goal; its flags: "
            + ", ".join(f"--{key}" for key in sorted(known))
        )
    missing = [
        field.key for field in draft.fields if field.default is None and not given.get(field.key)
    ]
    if missing:
        raise SpecError(
            f"{', '.join(f'--{key}' for key in missing)} missing: a {draft.kind!r} spec has no"
            " default for them"
        )
    values: dict[str, str] = {}
    for field in draft.fields:
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
        message = str(error).removeprefix(f"{field.key}: ")
        known = message.startswith("--")
        raise SpecError(message if known else f"--{field.key}: {message}") from error
    return value


def draft_spec(draft: Draft, values: FieldValues, *, folder: Path | None) -> str:
    """Return the text of a spec that `moetune plan` accepts.

    Args:
        draft: of the goal.
        values: as returned by `fill_values`.
        folder: that the file will lie in, which its paths are relative to; None: absolute paths.

    Raises:
        SpecError: the values contradict each other.
    """
    with temporary_spec(draft, values):
        return draft.text(values, folder=folder)


@contextmanager
def temporary_spec(draft: Draft, values: FieldValues) -> Iterator[Path]:
    """Yield a temporary file with the spec; its paths are absolute.

    Raises:
        SpecError: the values contradict each other; the message does not name the file.
    """
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        path = Path(scratch) / "spec.yaml"
        path.write_text(draft.text(values, folder=None), encoding="utf-8")
        try:
            draft.check(path)
            yield path
        except TunerError as error:
            shown = str(error).replace(f"{shown_path(path)}: ", "").replace(f"{path}: ", "")
            raise type(error)(shown) from error
