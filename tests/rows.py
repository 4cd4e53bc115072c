"""Tables of examples that one test goes through."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import pytest

LONGEST_ROW: Final = 300
"""Characters of a row that a failure shows."""

Test = Callable[..., None]


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
            assert table, "no row to check"
            failures, first = [], None
            for row in table:
                try:
                    test(**fixtures, **dict(zip(named, row, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"{repr(row)[:LONGEST_ROW]}: {type(error).__name__}: {error}")
                    first = first or error
            if failures:
                count = f"{len(failures)} of {len(table)} rows fail"
                raise AssertionError("\n".join([count, *failures])) from first

        asked = inspect.signature(test).parameters.values()
        fixtures = [one for one in asked if one.name not in named]
        of_every_row.__signature__ = inspect.Signature(fixtures)  # type: ignore[attr-defined]  # for pytest
        return of_every_row

    return decorated
