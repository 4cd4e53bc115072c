"""Instances that a router may pair at will, against every plan of small pools."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.instances.problem import (
    Column,
    ColumnGroup,
    DevicePool,
    InstanceObjective,
    InstanceRole,
    InstancesProblem,
    Route,
)
from solvers.result import Status
from tests.expect import present
from tuner.search.serve.program import Program, solve_program

MOST = 2
RATE_PER_S = 2.0
PAIRS = list(product((0, 1), (2, 3)))


def least_price(prices: list[float], legal: list[tuple[int, int]], *, needed: int) -> float:
    """Try every plan whose prefill and decode groups may all meet."""
    found = [
        sum(count * price for count, price in zip(counts, prices, strict=True))
        for counts in product(range(MOST + 1), repeat=4)
        if sum(counts[:2]) >= needed and sum(counts[2:]) >= needed
        if all((one, two) in legal for one, two in PAIRS if counts[one] and counts[two])
        if counts[0] + counts[2] <= 2 * MOST and counts[1] + counts[3] <= 2 * MOST
    ]
    return min(found, default=float("inf"))


@given(
    prices=st.lists(st.integers(1, 9).map(float), min_size=4, max_size=4),
    legal=st.lists(st.sampled_from(PAIRS), min_size=1, max_size=4, unique=True),
    needed=st.integers(1, 2 * MOST),
)
@settings(max_examples=40, deadline=None)
def test_every_chosen_prefill_instance_may_meet_every_chosen_decode_instance(
    prices: list[float], legal: list[tuple[int, int]], needed: int
) -> None:
    # Groups 0 and 1 prefill on two pools, 2 and 3 decode on them; own pools hold each to two.
    limits = tuple(DevicePool(name=f"of {number}", devices=MOST) for number in range(4))
    problem = InstancesProblem(
        pools=limits,
        groups=tuple(
            ColumnGroup(
                name=str(number), role=InstanceRole.PREFILL if number < 2 else InstanceRole.DECODE
            )
            for number in range(4)
        ),
        columns=tuple(
            Column(
                name=str(number),
                group=number,
                devices_P=tuple(int(number == pool) for pool in range(4)),
                rate_per_s=RATE_PER_S,
                price_per_hour=price,
            )
            for number, price in enumerate(prices)
        ),
        routes=tuple(Route(sender=one, receiver=two) for one, two in legal),
        objective=InstanceObjective.COST,
        demand_per_s=RATE_PER_S * needed,
        max_kinds=2,
    )
    program = Program(mode="disaggregated", problem=problem, options=())
    outcome = solve_program(program, time_limit_s=20.0).outcome
    expected = least_price(prices, legal, needed=needed)
    if expected == float("inf"):
        assert outcome.status is Status.INFEASIBLE
        return
    assert outcome.status is Status.OPTIMAL
    assert abs(outcome.objective - expected) < 1e-6
    assert outcome.bound <= expected + 1e-6
    carried = [flow for flow in present(outcome.solution).flow_per_s_E if flow > 1e-6]
    assert len(present(outcome.solution).flow_per_s_E) == len(legal)
    assert sum(carried) >= RATE_PER_S * needed * (1.0 - 1e-6)
    used = [number for number, count in enumerate(present(outcome.solution).count_J) if count]
    assert all((one, two) in legal for one, two in PAIRS if one in used and two in used)
