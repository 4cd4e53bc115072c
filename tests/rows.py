"""Tables of examples that one test goes through."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pytest

LONGEST_ROW: Final = 300
"""Characters of a row that a failure shows."""

Test = Callable[..., None]


class Failures:
    """What went wrong in the rows of a loop, so that one failure hides no other."""

    def __init__(self) -> None:
        self._rows = 0
        self._lines: list[str] = []
        self._first: BaseException | None = None

    @contextmanager
    def of(self, *row: object) -> Iterator[None]:
        """Note what a row raises, by the row's words, and go on."""
        self._rows += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            self._lines.append(f"{repr(row)[:LONGEST_ROW]}: {type(error).__name__}: {error}")
            self._first = self._first or error

    def check(self) -> None:
        """Fail with every line that was noted, and where there was no row."""
        assert self._rows, "no row to check"
        if self._lines:
            count = f"{len(self._lines)} of {self._rows} rows fail"
            raise AssertionError("\n".join([count, *self._lines])) from self._first


def each_row(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Call a test once for each row, as one case that fails with every row that failed.

    `names` are the arguments that a row fills, as in `pytest.mark.parametrize`: "one, other". All
    rows share the fixtures of the case, so no row may count on an empty folder.
    """
    named = tuple(names.split(", ")) if isinstance(names, str) else tuple(names)
    is_single = isinstance(names, str) and len(named) == 1
    table = [(row,) if is_single else tuple(row) for row in rows]

    def decorated(test: Test) -> Test:
        @functools.wraps(test)
        def of_every_row(**fixtures: Any) -> None:
            failures = Failures()
            for row in table:
                with failures.of(*row):
                    test(**fixtures, **dict(zip(named, row, strict=True)))
            failures.check()

        asked = inspect.signature(test).parameters.values()
        fixtures = [one for one in asked if one.name not in named]
        of_every_row.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]  # for pytest
        return of_every_row

    return decorated
