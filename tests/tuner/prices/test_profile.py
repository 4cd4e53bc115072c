from collections.abc import Callable

import pytest

from profilers.records import Case, Profile
from tests.profilers.testing import fake_profile, gemm_case, gemm_row
from tests.tuner.formulas import op_of
from tuner.errors import OutsideProfileError
from tuner.prices.profile import ProfilePrices


def test_measured_sizes_cost_what_was_measured(
    analytic_profile: Profile, formula_s: Callable[[Case], float]
) -> None:
    prices = ProfilePrices.from_profile(analytic_profile)
    for row in analytic_profile.measurements:
        assert prices.seconds(op_of(row.case)) == pytest.approx(formula_s(row.case), rel=1e-9)
    assert prices.extrapolated(op_of(row.case) for row in analytic_profile.measurements) == ()


def test_sizes_between_follow_the_formula_of_the_machine(
    analytic_profile: Profile, formula_s: Callable[[Case], float]
) -> None:
    # The base of the curves has the same three terms, so nothing is lost between the points.
    prices = ProfilePrices.from_profile(analytic_profile)
    case = gemm_case(777, n=333, k=111)
    assert prices.seconds(op_of(case)) == pytest.approx(formula_s(case), rel=1e-6)


def test_a_size_beyond_the_largest_is_named_as_extrapolated() -> None:
    prices = ProfilePrices.from_profile(fake_profile([gemm_row(16, 1e-3), gemm_row(64, 2e-3)]))
    inside, outside = op_of(gemm_case(32)), op_of(gemm_case(128))
    assert prices.extrapolated([inside]) == ()
    assert prices.extrapolated([inside, outside, outside]) == ("gemm",)


def test_what_was_never_measured_has_no_price() -> None:
    prices = ProfilePrices.from_profile(fake_profile([gemm_row(16, 1e-3)]))
    with pytest.raises(OutsideProfileError, match=r"no gemm/bf16/forward: measure it"):
        prices.seconds(op_of(gemm_case(16, dtype="bf16")))
