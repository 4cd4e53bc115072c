"""What tests expect of values and of refusals."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

Value = TypeVar("Value")


def present(value: Value | None) -> Value:
    """Return a value that must be there."""
    assert value is not None
    return value


@contextmanager
def refused(
    kind: type[BaseException] | tuple[type[BaseException], ...],
    *parts: str,
    match: str | None = None,
) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Expect an error that says these parts, in one line."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    said = str(caught.value)
    assert "\n" not in said
    for part in parts:
        assert part in said


def contains(text: str, *parts: str) -> None:
    """Expect every part in a text, and name those that it lacks."""
    missing = [part for part in parts if part not in text]
    assert not missing, f"{missing} are not in {text}"
