"""Cases of a loop in one test: those of a grid that are enough, and what went wrong in each."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


class Failures:
    """What went wrong in the cases of a loop, so that one failure hides no other."""

    def __init__(self) -> None:
        self._lines: list[str] = []

    @contextmanager
    def of(self, *case: object) -> Iterator[None]:
        """Note what a case raises, by the case's name, and go on."""
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            self._lines.append(f"{case}: {type(error).__name__}: {error}")

    def check(self) -> None:
        """Fail with every line that was noted."""
        assert not self._lines, "\n".join(self._lines)


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return points of a grid that hold every pair of values of every two axes.

    Greedy, and the same in every run: the point with the most new pairs comes next.
    """
    grid = list(itertools.product(*(range(len(axis)) for axis in axes)))
    held = {point: set(itertools.combinations(enumerate(point), 2)) for point in grid}
    missing = set().union(*held.values())
    chosen = []
    while missing:
        best = max(grid, key=lambda point: len(held[point] & missing))
        chosen.append(best)
        missing -= held[best]
    return [tuple(axis[at] for axis, at in zip(axes, point, strict=True)) for point in chosen]


def grid(*axes: Sequence[Any]) -> list[ParameterSet]:
    """Return parameters of a test that loops over points: every pair, and slowly the whole grid."""
    whole = list(itertools.product(*axes))
    return [
        pytest.param(pairs(*axes), id="pairs"),
        pytest.param(whole, id="grid", marks=pytest.mark.slow),
    ]
