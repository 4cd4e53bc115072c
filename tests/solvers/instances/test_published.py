"""Operating points and ratios that papers print, returned by the program."""

import itertools
import math

import pytest

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
from solvers.registry import INSTANCES
from solvers.result import Status
from tests.expect import present

LONG_SHARE = 0.496
"""Prefill-as-a-Service (arXiv:2604.15039): prompts above its threshold of 19.4k tokens."""
REMOTE_PER_S, LOCAL_PER_S, DECODE_PER_S = 1.61 / 4, 1.64 / 3, 3.91 / 5
"""Its stage rates, by instance: remote long prompts, local short ones, decode."""
LONG_BYTES = 13e9 / 8 / 1.61
"""Of a long request's KV cache: 13 Gbit/s of egress at 1.61 requests/s."""


def solved(problem: InstancesProblem) -> InstancePlan:
    outcome = INSTANCES.solve(problem, time_limit_s=60.0)
    assert outcome.status is Status.OPTIMAL
    return present(outcome.solution)


def offload(*, egress_bytes_per_s: float = 100e9 / 8) -> InstancesProblem:
    """Four remote instances that prefill long prompts, eight local ones for everything else."""
    return InstancesProblem(
        pools=(DevicePool(name="remote", devices=32), DevicePool(name="local", devices=64)),
        groups=(
            ColumnGroup(name="short", role=InstanceRole.PREFILL, request_class=0),
            ColumnGroup(name="long", role=InstanceRole.PREFILL, request_class=1),
            ColumnGroup(name="decode", role=InstanceRole.DECODE),
        ),
        columns=(
            Column(name="local p", group=0, devices_P=(0, 8), rate_per_s=LOCAL_PER_S),
            Column(name="remote p", group=1, devices_P=(8, 0), rate_per_s=REMOTE_PER_S),
            Column(name="local d", group=2, devices_P=(0, 8), rate_per_s=DECODE_PER_S),
        ),
        links=(TransferLink(name="egress", bytes_per_s=egress_bytes_per_s),),
        routes=(
            Route(sender=0, receiver=2),
            Route(sender=1, receiver=2, request_bytes=LONG_BYTES, links=(0,)),
        ),
        share_C=(1.0 - LONG_SHARE, LONG_SHARE),
        objective=InstanceObjective.RATE,
    )


def test_prefill_as_a_service_is_split_as_published() -> None:
    # Remote 4, local prefill 3, local decode 5: 3.24 requests/s, 13 of 100 Gbit/s.
    plan = solved(offload())
    assert plan.count_J == (3, 4, 5)
    assert plan.rate_per_s == pytest.approx(3.24, abs=0.01)
    assert plan.flow_per_s_E[1] * LONG_BYTES * 8 == pytest.approx(13e9, rel=0.01)


def test_a_thin_link_limits_the_offload_by_its_egress() -> None:
    for gbit_per_s in (
        2.0,
        5.0,
        9.0,
        12.0,
    ):
        remote = min(4 * REMOTE_PER_S, gbit_per_s * 1e9 / 8 / LONG_BYTES) / LONG_SHARE
        best = max(
            min(remote, prefill * LOCAL_PER_S / (1.0 - LONG_SHARE), (8 - prefill) * DECODE_PER_S)
            for prefill in range(1, 8)
        )
        plan = solved(offload(egress_bytes_per_s=gbit_per_s * 1e9 / 8))
        assert plan.rate_per_s == pytest.approx(best, rel=1e-6)


def one_pool(prefill_per_s: float, decode_per_s: float, instances: int) -> InstancesProblem:
    return InstancesProblem(
        pools=(DevicePool(name="npu", devices=instances),),
        groups=(
            ColumnGroup(name="p", role=InstanceRole.PREFILL),
            ColumnGroup(name="d", role=InstanceRole.DECODE),
        ),
        columns=(
            Column(name="p", group=0, devices_P=(1,), rate_per_s=prefill_per_s),
            Column(name="d", group=1, devices_P=(1,), rate_per_s=decode_per_s),
        ),
        routes=(Route(sender=0, receiver=1),),
        objective=InstanceObjective.RATE,
    )


def test_the_homogeneous_rows_of_the_same_table() -> None:
    # 9 of 12 local instances prefill whole prompts at 2.11 / 9 requests/s each: 2.11 in all.
    plan = solved(one_pool(2.11 / 9, 2.35 / 3, 12))
    assert plan.count_J == (9, 3)
    assert plan.rate_per_s == pytest.approx(2.11, rel=1e-6)


def test_the_ratio_is_that_of_pd_serve() -> None:
    # P/D-Serve (arXiv:2408.08147): n_p : n_d = (rate of a decode) : (rate of a prefill instance);
    # of a whole number of instances the better of the two roundings, one of each at least.
    rates = ((5.6, 10.0), (0.3, 2.9), (8.0, 1.1))
    for (prefill_per_s, decode_per_s), instances in itertools.product(rates, (2, 7, 16, 100)):
        even = instances * decode_per_s / (prefill_per_s + decode_per_s)
        both = [min(max(1, round_(even)), instances - 1) for round_ in (math.floor, math.ceil)]
        best = max(min(n * prefill_per_s, (instances - n) * decode_per_s) for n in both)
        plan = solved(one_pool(prefill_per_s, decode_per_s, instances))
        assert plan.rate_per_s == pytest.approx(best, rel=1e-6), (prefill_per_s, instances)
