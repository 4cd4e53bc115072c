"""Demands far below what one instance serves."""

import pytest

from solvers.instances.alternatives import alternatives
from solvers.instances.problem import (
    Column,
    ColumnGroup,
    DevicePool,
    InstanceObjective,
    InstanceRole,
    InstancesProblem,
    Route,
)
from solvers.registry import INSTANCES
from solvers.result import Status
from tests.expect import present


def test_next_to_nothing_takes_one_instance_of_each_role() -> None:
    for demand_per_s in (
        1e-12,
        1e-9,
        1e-5,
        1.0,
    ):
        problem = InstancesProblem(
            pools=(DevicePool(name="a100", devices=4096),),
            groups=(
                ColumnGroup(name="p", role=InstanceRole.PREFILL),
                ColumnGroup(name="d", role=InstanceRole.DECODE),
                ColumnGroup(name="both", role=InstanceRole.AGGREGATED),
            ),
            columns=(
                Column(name="p", group=0, devices_P=(1,), rate_per_s=5.6),
                Column(name="d", group=1, devices_P=(2,), rate_per_s=10.0),
                Column(name="both", group=2, devices_P=(4,), rate_per_s=3.0),
            ),
            routes=(Route(sender=0, receiver=1),),
            demand_per_s=demand_per_s,
            objective=InstanceObjective.DEVICES,
        )
        outcome = INSTANCES.solve(problem, time_limit_s=60.0)
        assert outcome.status is Status.OPTIMAL
        assert outcome.objective == 3.0
        assert present(outcome.solution).count_J == (1, 1, 0)
        assert present(outcome.solution).rate_per_s == pytest.approx(demand_per_s)
        near = alternatives(
            problem, present(outcome.solution), band_ratio=0.5, max_plans=9, time_limit_s=60.0
        )
        assert {plan.count_J for plan in near.plans} == {(1, 1, 0), (0, 0, 1)}
        assert near.is_complete
