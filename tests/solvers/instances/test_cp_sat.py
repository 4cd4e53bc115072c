import pytest

from solvers.instances.counts import common_unit
from solvers.instances.problem import InstanceObjective
from solvers.registry import INSTANCES
from solvers.result import Status
from tests.solvers.instances.testing import mixed_pool


def test_decimal_weights_are_whole_numbers_of_a_unit() -> None:
    rows: tuple[tuple[tuple[float, ...], float], ...] = (
        ((3.0, 0.9, 1.8), 0.3),
        ((2.0, 4.0, 8.0), 2.0),
        ((2.49, 0.9999), 0.0003),
    )
    for weights, unit in rows:
        assert common_unit(weights) == pytest.approx(unit, rel=1e-9)
        assert all(abs(w / common_unit(weights) - round(w / unit)) < 1e-6 for w in weights)


def test_other_weights_are_counted_in_fine_steps() -> None:
    assert common_unit((2.0**0.5, 1.0)) == pytest.approx(2.0**0.5 * 1e-9)


@pytest.mark.parametrize(
    "objective",
    [
        pytest.param(each, marks=() if each.rate_is_fixed else pytest.mark.slow)
        for each in InstanceObjective
    ],
)
def test_both_methods_agree_on_a_mixed_pool(objective: InstanceObjective) -> None:
    problem = mixed_pool(seed=3, objective=objective)
    one, other = (
        INSTANCES.solve(problem, method=method, time_limit_s=60.0) for method in INSTANCES.methods
    )
    assert one.status is other.status is Status.OPTIMAL
    assert one.objective == pytest.approx(other.objective, rel=2e-6)


def test_out_of_time_is_never_called_optimal() -> None:
    outcome = INSTANCES.solve(mixed_pool(), method="cp_sat", time_limit_s=1e-6)
    assert outcome.status is Status.UNKNOWN
