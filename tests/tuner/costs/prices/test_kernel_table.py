from collections.abc import Callable

import pytest

from profilers.records import Case, Profile
from tests.profilers.testing import fake_profile, gemm_case, gemm_row
from tuner.costs.prices.kernel_table import KernelTable
from tuner.errors import OutsideProfileError


def test_measured_sizes_cost_what_was_measured(
    analytic_profile: Profile, formula_s: Callable[[Case], float]
) -> None:
    table = KernelTable.from_profile(analytic_profile)
    for row in analytic_profile.measurements:
        assert table.seconds(row.case) == pytest.approx(formula_s(row.case), rel=1e-9)
        assert not table.is_extrapolated(row.case)


def test_sizes_between_follow_the_formula_of_the_machine(
    analytic_profile: Profile, formula_s: Callable[[Case], float]
) -> None:
    # The base of the curves has the same three terms, so nothing is lost between the points.
    table = KernelTable.from_profile(analytic_profile)
    case = gemm_case(777, n=333, k=111)
    assert table.seconds(case) == pytest.approx(formula_s(case), rel=1e-6)


def test_a_size_beyond_the_largest_is_named_as_extrapolated() -> None:
    table = KernelTable.from_profile(fake_profile([gemm_row(16, 1e-3), gemm_row(64, 2e-3)]))
    inside, outside = gemm_case(32), gemm_case(128)
    assert table.extrapolated([inside]) == ()
    assert table.extrapolated([inside, outside, outside]) == ("gemm",)


def test_what_was_never_measured_has_no_price() -> None:
    table = KernelTable.from_profile(fake_profile([gemm_row(16, 1e-3)]))
    with pytest.raises(OutsideProfileError, match=r"no gemm/bf16/forward: measure it"):
        table.seconds(gemm_case(16, dtype="bf16"))
