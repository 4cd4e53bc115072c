import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.links.collectives import BUILDERS, uneven_shares
from profilers.links.groups import Shape
from profilers.links.suite import TeamClock, kinds_of
from profilers.team import SingleRank
from profilers.timing import measure
from tests.profilers.testing import FakeClock


def test_the_first_receiver_gets_two_and_a_half_shares() -> None:
    # a quarter times 2.5 of 1600 is 1000; the other three share 600
    assert uneven_shares(1600, ranks=4) == (1000, 200, 200, 200)


def test_of_two_receivers_the_first_gets_four_fifths() -> None:
    assert uneven_shares(100, ranks=2) == (80, 20)


@settings(deadline=None, max_examples=100)
@given(total=st.integers(1, 10**9), ranks=st.integers(2, 64))
def test_shares_sum_to_the_whole(total: int, ranks: int) -> None:
    shares = uneven_shares(total, ranks=ranks)
    assert sum(shares) == total
    assert len(shares) == ranks
    assert min(shares) >= 0


def test_sending_is_measured_over_the_smallest_rings_only() -> None:
    assert "send_recv" in kinds_of(Shape(ranks=2, stride=2), world=12)
    assert "send_recv" not in kinds_of(Shape(ranks=3, stride=2), world=12)
    assert "send_recv" in kinds_of(Shape(ranks=3, stride=1), world=3)
    assert set(kinds_of(Shape(ranks=2, stride=1), world=2)) == set(BUILDERS)


class OneSlowPeer(SingleRank):
    """A team in which somebody else takes three times as long."""

    def slowest_s(self, times_s: object) -> tuple[float, ...]:
        assert isinstance(times_s, tuple)
        return tuple(3.0 * time_s for time_s in times_s)


def test_a_repeat_takes_as_long_as_on_the_slowest_rank() -> None:
    clock = FakeClock()
    shared = TeamClock(team=OneSlowPeer(), clock=clock)
    times_s = measure(lambda: clock.advance(0.5), clock=shared, budget_s=0.0)
    assert times_s == pytest.approx((1.5,) * 5)
    # two warm-ups and five repeats, as everybody counts them
    assert shared.now_s() == pytest.approx(7 * 1.5)
