import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.benchmark import Setting
from profilers.clock import HostClock
from profilers.links.collectives import BUILDERS, uneven_shares
from profilers.links.groups import Shape, members, shapes
from profilers.links.pairs import PairBenchmark, link_rounds
from profilers.links.rounds import rounds
from profilers.links.suite import TeamClock, kinds_of
from profilers.records import MeasurementStatus
from profilers.team import SingleRank
from profilers.timing import measure
from tests.profilers.testing import FakeClock
from tests.rows import each_row


def test_the_first_receiver_gets_more_than_its_share() -> None:
    # a quarter times 2.5 of 1600 is 1000; the other three share 600
    assert uneven_shares(1600, ranks=4) == (1000, 200, 200, 200)
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


def test_shapes_and_their_groups_by_hand() -> None:
    found = [(shape.ranks, shape.stride) for shape in shapes(8)]
    assert found == [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1)]
    assert members(Shape(ranks=2, stride=2), world=8) == ((0, 2), (1, 3), (4, 6), (5, 7))
    assert shapes(1) == ()
    with pytest.raises(ValueError, match="do not tile 6"):
        members(Shape(ranks=4, stride=1), world=6)
    with pytest.raises(ValueError, match="has no links"):
        Shape(ranks=1, stride=1)
    assert rounds(1) == ()


@settings(deadline=None, max_examples=60)
@given(world=st.integers(1, 96))
def test_the_groups_of_every_shape_hold_every_rank_once(world: int) -> None:
    for shape in shapes(world):
        groups = members(shape, world=world)
        assert sorted(rank for group in groups for rank in group) == list(range(world))
        assert {len(group) for group in groups} == {shape.ranks}


# Rounds in which everyone meets everyone.


@each_row("members", [2, 3, 4, 5, 8, 9, 16, 33, 64])
def test_every_pair_occurs_once_in_the_fewest_rounds(members: int) -> None:
    schedule = rounds(members)
    assert len(schedule) == (members - 1 if members % 2 == 0 else members)
    pairs = [pair for each in schedule for pair in each]
    assert sorted(pairs) == list(itertools.combinations(range(members), 2))


@each_row("members", [4, 7, 64])
def test_no_member_is_in_two_pairs_of_a_round(members: int) -> None:
    for each in rounds(members):
        present = [member for pair in each for member in pair]
        assert len(present) == len(set(present)) == 2 * (members // 2)


# Which messages are timed; two ranks really send in tests/profilers/test_session.py.


class Nodes(SingleRank):
    """The first of several ranks that are not connected."""

    def __init__(self, *, world: int, local_world: int) -> None:
        self.world = world
        self.local_world = local_world


def _benchmark(*, world: int, local_world: int) -> PairBenchmark:
    team = Nodes(world=world, local_world=local_world)
    setting = Setting(
        device="cpu", dtypes=("fp32",), team=team, clock=HostClock(), directory=Path()
    )
    return PairBenchmark(setting=setting)


def test_rounds_of_links_by_hand() -> None:
    schedule = link_rounds(nodes=64, ranks_per_node=1)
    assert len(schedule) == 63
    assert all(len(link_round.pairs) == 32 for link_round in schedule)
    schedule = link_rounds(nodes=2, ranks_per_node=2)
    assert [(link_round.lanes, link_round.pairs) for link_round in schedule] == [
        (1, ((0, 2),)),
        (2, ((0, 2), (1, 3))),
        (1, ((0, 1), (2, 3))),
    ]


def test_every_round_is_measured_once_a_size() -> None:
    cases = _benchmark(world=6, local_world=2).cases()
    assert len({case.id for case in cases}) == len(cases)
    trips = [case for case in cases if case.kind == "round_trip"]
    # Three nodes: 3 rounds between them and 1 inside, each measured both ways.
    assert len(trips) == 4


def test_pairs_that_are_not_here_are_not_measured() -> None:
    case = _benchmark(world=4, local_world=2).cases()[0]
    (row,) = _benchmark(world=1, local_world=1).measure(case, budget_s=1.0)
    assert row.status is MeasurementStatus.FAILED
    assert "no such pair" in row.error
    benchmark = _benchmark(world=1, local_world=1)
    assert benchmark.cases() == ()
    assert benchmark.note()
