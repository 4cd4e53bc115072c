from typing import Any

import pytest

from solvers.instances.check import objective, violations
from solvers.instances.problem import (
    Column,
    ColumnGroup,
    DevicePool,
    InstanceObjective,
    InstancePlan,
    InstanceRole,
    InstancesProblem,
    Route,
    TransferLink,
)
from tests.solvers.refusals import unrefused


def problem(**changes: Any) -> InstancesProblem:
    """Prompts of two classes on two pools, decode and aggregated on the second."""
    given: dict[str, Any] = {
        "pools": (DevicePool(name="new", devices=4), DevicePool(name="old", devices=8)),
        "groups": (
            ColumnGroup(name="short", role=InstanceRole.PREFILL, request_class=0),
            ColumnGroup(name="long", role=InstanceRole.PREFILL, request_class=1),
            ColumnGroup(name="decode", role=InstanceRole.DECODE),
            ColumnGroup(name="both", role=InstanceRole.AGGREGATED),
        ),
        "columns": (
            Column(name="s", group=0, devices_P=(0, 1), rate_per_s=3.0, price_per_hour=1.0),
            Column(name="l", group=1, devices_P=(2, 0), rate_per_s=2.0, price_per_hour=5.0),
            Column(name="d", group=2, devices_P=(1, 1), rate_per_s=4.0, price_per_hour=3.0),
            Column(name="a", group=3, devices_P=(0, 2), rate_per_s=1.0, price_per_hour=2.0),
        ),
        "links": (TransferLink(name="wire", bytes_per_s=10.0),),
        "routes": (
            Route(sender=0, receiver=2),
            Route(sender=1, receiver=2, request_bytes=5.0, links=(0,)),
        ),
        "share_C": (0.75, 0.25),
        "objective": InstanceObjective.COST,
        "demand_per_s": 4.0,
        "spare_ratio": 0.25,
    }
    return InstancesProblem(**(given | changes))


def plan(**changes: Any) -> InstancePlan:
    """5 requests/s provided for: 1 aggregated, of the other 4 three short and one long."""
    given: dict[str, Any] = {
        "count_J": (1, 1, 1, 1),
        "flow_per_s_E": (3.0, 1.0),
        "aggregated_per_s": 1.0,
        "rate_per_s": 5.0,
    }
    return InstancePlan(**(given | changes))


def test_objectives_by_hand() -> None:
    for objective_kind, value in (
        (InstanceObjective.COST, 1.0 + 5.0 + 3.0 + 2.0),
        (InstanceObjective.DEVICES, 1 + 2 + 2 + 2),
        (InstanceObjective.RATE, 1.25 / 5.0),
    ):
        assert objective(problem(objective=objective_kind), plan()) == pytest.approx(value)
        weighed = sum(problem(objective=objective_kind).weight_J)
        if objective_kind is not InstanceObjective.RATE:
            assert weighed == pytest.approx(value)


def test_an_allowed_plan_breaks_nothing() -> None:
    assert violations(problem(), plan()) == ()
    assert violations(problem(max_kinds=2), plan()) == ()


def test_every_broken_rule_is_named() -> None:
    for changed, changes, complaint in (
        ({"count_J": (1, 1)}, {}, "2 counts and 2 flows for 4 columns and 2 routes"),
        ({"count_J": (1, 1, 1, -1)}, {}, "column 3 runs -1 instances"),
        ({"flow_per_s_E": (3.0, float("nan"))}, {}, "nan requests/s are not a flow"),
        ({"rate_per_s": 0.0}, {}, "must be more than none"),
        ({"count_J": (1, 2, 1, 1)}, {}, "pool 'new' gives 5 devices, it has 4"),
        ({"flow_per_s_E": (3.1, 1.0)}, {}, "group 'short' is handed 3.1 requests/s, it serves 3.0"),
        ({"count_J": (2, 1, 1, 1), "flow_per_s_E": (3.1, 1.0)}, {}, "group 'decode' is handed 4.1"),
        ({"aggregated_per_s": 1.1}, {}, "aggregated instances are given 1.1 requests/s"),
        (
            {},
            {"links": (TransferLink(name="wire", bytes_per_s=4.9),)},
            "link 'wire' carries 5.0 bytes/s",
        ),
        ({"flow_per_s_E": (3.0, 0.9)}, {}, "class 1 asks for 1.25 requests/s, 1.15 are served"),
        ({}, {"demand_per_s": 4.1}, "5.0 requests/s are provided for, 5.125 are required"),
        ({}, {"max_kinds": 1}, "2 kinds of prefill instances are in use, at most 1"),
    ):
        broken = violations(problem(**changes), plan(**changed))
        assert any(complaint in line for line in broken), (complaint, broken)


def test_an_impossible_problem_cannot_be_made() -> None:
    rows: tuple[tuple[dict[str, Any], str], ...] = (
        ({"pools": ()}, "must be distinct names"),
        ({"pools": (DevicePool(name="a", devices=1),) * 2}, "must be distinct names"),
        (
            {"pools": (DevicePool(name="a", devices=-1), DevicePool(name="b", devices=1))},
            "devices must be",
        ),
        ({"links": (TransferLink(name="wire", bytes_per_s=0.0),)}, "bytes_per_s must be positive"),
        ({"share_C": (0.5, 0.6)}, "must be shares above 0 that sum to 1"),
        ({"share_C": (1.0,)}, "request_class must be one of 1 classes"),
        ({"columns": (Column(name="x", group=9, devices_P=(1, 1), rate_per_s=1.0),)}, "group must"),
        ({"columns": (Column(name="x", group=0, devices_P=(1,), rate_per_s=1.0),)}, "devices_P"),
        ({"columns": (Column(name="x", group=0, devices_P=(0, 0), rate_per_s=1.0),)}, "a device"),
        ({"columns": (Column(name="x", group=0, devices_P=(1, 0), rate_per_s=0.0),)}, "rate_per_s"),
        (
            {"columns": (Column(name="x", group=0, devices_P=(1, 0), rate_per_s=1.0),)},
            "objective cost needs a price_per_hour above 0",
        ),
        ({"routes": (Route(sender=0, receiver=7),)}, "joins groups that do not exist"),
        ({"routes": (Route(sender=2, receiver=0),)}, "must join a prefill group to a decode group"),
        ({"routes": (Route(sender=0, receiver=2, links=(3,)),)}, "takes links that do not exist"),
        ({"routes": (Route(sender=0, receiver=2, request_bytes=-1.0),)}, "request_bytes must be"),
        ({"routes": (Route(sender=0, receiver=2),) * 2}, "more than one route"),
        ({"demand_per_s": 0.0}, "objective cost needs a demand_per_s above 0"),
        ({"demand_per_s": float("inf")}, "must be finite"),
        ({"max_kinds": 0}, "max_kinds 0 must be at least 1"),
    )
    assert unrefused(problem, rows) == []
