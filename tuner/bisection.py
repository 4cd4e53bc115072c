"""Bisection of a threshold."""

from collections.abc import Callable


def bisect(is_enough: Callable[[float], bool], low: float, high: float, *, halvings: int) -> float:
    """Return about the least amount that is enough, between one too small and one that is."""
    for _ in range(halvings):
        middle = 0.5 * (low + high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high
