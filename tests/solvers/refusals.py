"""Tables of what is refused, as loops that name each row that is not."""

import re
from collections.abc import Callable, Iterable
from typing import Any


def unrefused(make: Callable[..., object], rows: Iterable[tuple[dict[str, Any], str]]) -> list[str]:
    """Name the rows, changes and a pattern, that `make` takes or refuses in other words."""
    actual = []
    for changes, complaint in rows:
        try:
            make(**changes)
        except ValueError as error:
            if not re.search(complaint, str(error)):
                actual.append(f"{changes} should say {complaint!r}: {error}")
        else:
            actual.append(f"{changes} is taken, {complaint!r} is wrong")
    return actual
