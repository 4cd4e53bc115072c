"""How a rule lists what it allows."""

from collections.abc import Iterable


def listed(values: Iterable[object], *, joiner: str = ", ") -> str:
    """Return the values in one order, whatever set they came from."""
    return joiner.join(str(value) for value in sorted(values, key=str))
