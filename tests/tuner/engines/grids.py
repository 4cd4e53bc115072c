"""Points of a grid that are enough."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return points of a grid that hold every pair of values of every two axes.

    Greedy, and the same in every run: the point with the most new pairs comes next.
    """
    grid = list(itertools.product(*(range(len(axis)) for axis in axes)))
    kept = {point: set(itertools.combinations(enumerate(point), 2)) for point in grid}
    missing = set().union(*kept.values())
    chosen = []
    while missing:
        best = max(grid, key=lambda point: len(kept[point] & missing))
        chosen.append(best)
        missing -= kept[best]
    return [tuple(axis[at] for axis, at in zip(axes, point, strict=True)) for point in chosen]


def grid(*axes: Sequence[Any]) -> list[ParameterSet]:
    """Return parameters of a test that loops over points: every pair, and slowly the whole grid."""
    whole = list(itertools.product(*axes))
    return [
        pytest.param(pairs(*axes), id="pairs"),
        pytest.param(whole, id="grid", marks=pytest.mark.slow),
    ]
