"""Tables that one test goes through, so that a failure names every row that fails."""

import inspect
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import pytest

Test = Callable[..., None]


def for_each(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Test], Test]:
    """Call a test with every row of a table, as parametrize would, but as one case.

    Fixtures are made once: a row must not count on a folder that no row before has written to.
    """
    columns = tuple(names.split(", ")) if isinstance(names, str) else tuple(names)
    table = tuple(rows)

    def decorate(test: Test) -> Test:
        @wraps(test)
        def through(**fixtures: Any) -> None:
            failures = []
            for row in table:
                cells = (row,) if len(columns) == 1 else row
                try:
                    test(**fixtures, **dict(zip(columns, cells, strict=True)))
                except (Exception, pytest.fail.Exception) as failure:
                    failures.append(f"{row!r:.300}: {type(failure).__name__}: {failure}")
            assert table, "no row"
            assert not failures, f"{len(failures)} of {len(table)} rows\n" + "\n".join(failures)

        signature = inspect.signature(test)
        kept = [each for each in signature.parameters.values() if each.name not in columns]
        through.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined] # Of pytest.
        return through

    return decorate
