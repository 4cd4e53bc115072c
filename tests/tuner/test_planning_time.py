"""`solve_s` is the time that the whole plan took, not that of its first search."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.rows import each_row
from tuner import api

ROOT = Path(__file__).parents[2]
SPECS = {
    "train": ROOT / "examples" / "checks" / "train-infeasible" / "spec.yaml",
    "serve": ROOT / "examples" / "checks" / "serve-infeasible" / "spec.yaml",
    "place": ROOT / "examples" / "checks" / "place-balance" / "spec.yaml",
}


@each_row("kind", SPECS)
def test_the_stated_time_is_from_the_call_to_the_plan(kind: str) -> None:
    ticks = itertools.count()
    asked: list[float] = []

    def clock() -> float:
        # A clock that moves only when it is asked, by a millisecond.
        asked.append(next(ticks) / 1000.0)
        return asked[-1]

    plan_of: dict[str, Callable[..., object]] = {
        "train": api.plan,
        "serve": api.deploy,
        "place": api.place,
    }
    made = plan_of[kind](SPECS[kind], clock=clock)
    certificate = made.plan.certificate  # type: ignore[attr-defined] # of any kind
    assert len(asked) > 2
    assert certificate.solve_s == pytest.approx(asked[-1] - asked[0])
