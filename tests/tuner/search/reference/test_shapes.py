from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profilers.records import Case
from tests.rows import each_row
from tuner.goals.train_spec import read_spec
from tuner.search.reference.shapes import cases_for

MakeCase = Callable[..., Any]


@pytest.mark.slow
@each_row(
    "changes",
    [{}, {"goal": {"precision": "fp32"}}, {"search": {"recompute": ["full"], "chunks": [2]}}],
)
def test_planning_needs_no_price_that_is_not_listed(
    make_case: MakeCase, changes: dict[str, Any]
) -> None:
    asked_for: set[str] = set()
    meeting: set[tuple[int, ...]] = set()

    def note(case: Case) -> float:
        # How long ranks work before they meet follows from prices; only who meets is known before.
        if case.operation == "rendezvous":
            meeting.add(_group(case))
        else:
            asked_for.add(case.id)
        return 1e-3

    machine = {"seconds": note, "num_devices": 4}
    case = make_case(machine=machine, pool={"devices_per_node": 4}, **({"search": {}} | changes))
    case.plan()
    listed = cases_for(case.problem.spec)
    assert asked_for
    assert asked_for <= {case.id for case in listed}
    assert meeting
    assert meeting <= {_group(case) for case in listed if case.operation == "collective"}


def _group(case: Case) -> tuple[int, ...]:
    return tuple(case.axes[axis] for axis in ("ranks", "stride", "world"))


def test_no_case_is_listed_twice_and_the_order_is_reproducible(
    tiny_spec: Callable[..., Path],
) -> None:
    spec = read_spec(tiny_spec())
    names = [case.id for case in cases_for(spec)]
    assert len(names) == len(set(names))
    assert names == [case.id for case in cases_for(spec)]
