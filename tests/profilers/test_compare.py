import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.compare import CaseVerdict, compare, holm, incomparable, incomplete_beta, welch_p
from profilers.errors import MachineMismatchError
from profilers.records import Measurement, MeasurementStatus
from tests.expect import present
from tests.profilers.testing import fake_machine, fake_profile, gemm_case, gemm_row
from tests.rows import each_row

TIMES = st.lists(st.floats(1e-6, 1.0), min_size=1, max_size=8)


def noisy(m: int, *, scale: float, seed: int, spread: float = 0.01) -> Measurement:
    noise = random.Random(seed)
    return gemm_row(m, *(scale * math.exp(noise.gauss(0.0, spread)) for _ in range(5)))


def test_a_slow_down_of_a_fifth_is_found_among_hundreds_of_cases() -> None:
    before = [noisy(m, scale=1e-3, seed=m) for m in range(1, 301)]
    after = [noisy(m, scale=1.2e-3 if m == 7 else 1e-3, seed=1000 + m) for m in range(1, 301)]
    found = compare(fake_profile(before), fake_profile(after))
    slower = [one for one in found if one.verdict is not CaseVerdict.SAME]
    assert [one.case.axes["m"] for one in slower] == [7]
    assert slower[0].verdict is CaseVerdict.SLOWER
    assert slower[0].ratio == pytest.approx(1.2, rel=0.05)


def test_small_changes_and_changes_within_the_noise_are_none() -> None:
    before, after = gemm_row(8, *[1.0, 1.0001] * 10), gemm_row(8, *[1.03, 1.0301] * 10)
    (one,) = compare(fake_profile([before]), fake_profile([after]))
    assert one.verdict is CaseVerdict.SAME
    assert present(one.p_value) < 1e-6
    before, after = gemm_row(8, 1.0, 3.0, 2.0), gemm_row(8, 1.3, 3.9, 2.6)
    (one,) = compare(fake_profile([before]), fake_profile([after]))
    assert one.verdict is CaseVerdict.SAME
    profile = fake_profile([noisy(m, scale=1.0, seed=m) for m in (1, 2, 3)])
    assert {one.verdict for one in compare(profile, profile)} == {CaseVerdict.SAME}


def test_swapping_the_profiles_swaps_the_verdict() -> None:
    before = fake_profile([noisy(8, scale=1.0, seed=1)])
    after = fake_profile([noisy(8, scale=2.0, seed=2)])
    assert [one.verdict for one in compare(before, after)] == [CaseVerdict.SLOWER]
    assert [one.verdict for one in compare(after, before)] == [CaseVerdict.FASTER]
    after = fake_profile([noisy(8, scale=0.5, seed=2)], machine=fake_machine(device="Other 1"))
    assert [one.verdict for one in compare(before, after, anyway=True)] == [CaseVerdict.FASTER]


def test_cases_of_only_one_profile_are_named() -> None:
    failed = Measurement(case=gemm_case(4), status=MeasurementStatus.FAILED, error="no")
    found = compare(
        fake_profile([gemm_row(4, 1.0), gemm_row(8, 1.0)]),
        fake_profile([failed, gemm_row(16, 2.0)]),
    )
    assert {one.case.axes["m"]: one.verdict for one in found} == {
        4: CaseVerdict.ONLY_FIRST,
        8: CaseVerdict.ONLY_FIRST,
        16: CaseVerdict.ONLY_SECOND,
    }


def test_every_fact_that_differs_is_named_in_one_line() -> None:
    here = fake_profile([gemm_row(4, 1.0)])
    machine = fake_machine(device="Other 1", world=2).model_copy(update={"driver": "570.1"})
    with pytest.raises(MachineMismatchError) as caught:
        compare(here, fake_profile([gemm_row(4, 1.0)], machine=machine))
    said = str(caught.value)
    assert "\n" not in said
    for fact in ("'Other 1' there", "driver: '' here, '570.1' there", "ranks: 1 here", "--anyway"):
        assert fact in said


@each_row(
    ("changes", "said"),
    [
        ({"ranks_per_node": 4}, "ranks per node: 2 here, 4 there"),
        ({"oversubscribed": True}, "cores or accelerators: one rank each here, shared by ranks"),
        ({"ranks_per_node": 0}, ""),
        ({"hostname": "another", "hosts": ("a", "b")}, ""),
    ],
)
def test_the_layout_of_ranks_is_part_of_the_machine_and_its_name_is_not(
    changes: dict[str, object], said: str
) -> None:
    here = fake_machine(world=4).model_copy(update={"ranks_per_node": 2})
    found = incomparable(here, here.model_copy(update=changes))
    assert "; ".join(found).startswith(said)
    assert bool(found) == bool(said)


def test_evidence_by_hand() -> None:
    # sorted 0.01, 0.02, 0.04 times 3, 2, 1 -> 0.03, 0.04, 0.04
    assert holm([0.04, 0.01, 0.02]) == pytest.approx((0.04, 0.03, 0.04))
    assert holm([]) == ()
    # 4.604 is the 99.5 % quantile of t at 4 degrees of freedom, so two-sided p = 0.01
    assert incomplete_beta(4 / (4 + 4.604**2), a=2.0, b=0.5) == pytest.approx(0.01, rel=1e-3)
    # 2.228 is the 97.5 % quantile at 10 degrees of freedom
    assert incomplete_beta(10 / (10 + 2.228**2), a=5.0, b=0.5) == pytest.approx(0.05, rel=1e-3)


@each_row("x", [0.0, 0.01, 0.3, 0.5, 0.9, 0.999, 1.0])
def test_the_incomplete_beta_of_halves_is_an_arcsine(x: float) -> None:
    expected = 2.0 / math.pi * math.asin(math.sqrt(x))
    assert incomplete_beta(x, a=0.5, b=0.5) == pytest.approx(expected, abs=1e-9)


@settings(deadline=None, max_examples=100)
@given(first=TIMES, second=TIMES)
def test_a_p_value_is_symmetric(first: list[float], second: list[float]) -> None:
    p_value = welch_p(first, second)
    assert 0.0 <= p_value <= 1.0
    assert welch_p(second, first) == pytest.approx(p_value, abs=1e-9)


def test_too_little_is_no_evidence_and_no_time_no_ratio() -> None:
    assert welch_p([1.0], [2.0, 2.0]) == 1.0
    assert welch_p([0.0, 1.0], [2.0, 2.0]) == 1.0
    assert welch_p([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert welch_p([1.0, 1.0], [2.0, 2.0]) == 0.0
    before, after = gemm_row(8, 0.0, 0.0), gemm_row(8, 1.0, 1.0)
    (one,) = compare(fake_profile([before]), fake_profile([after]))
    assert (one.first_s, one.second_s, one.ratio) == (0.0, 1.0, None)
    (one,) = compare(fake_profile([gemm_row(8, 5e-324, 5e-324)]), fake_profile([after]))
    assert (one.verdict, one.ratio) == (CaseVerdict.SLOWER, None)
