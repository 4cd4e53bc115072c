"""Lists of allowed values in messages."""

from collections.abc import Iterable


def listed(values: Iterable[object], *, joiner: str = ", ") -> str:
    """Return the values sorted and joined."""
    return joiner.join(str(value) for value in sorted(values, key=str))
