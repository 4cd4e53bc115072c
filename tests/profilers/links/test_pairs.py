"""Which messages are timed; two ranks really send in tests/profilers/test_session.py."""

from pathlib import Path

from profilers.benchmark import Setting
from profilers.clock import HostClock
from profilers.links.pairs import PairBenchmark, link_rounds
from profilers.records import MeasurementStatus
from profilers.team import SingleRank


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


def test_64_nodes_of_one_rank_take_63_rounds() -> None:
    schedule = link_rounds(nodes=64, ranks_per_node=1)
    assert len(schedule) == 63
    assert all(len(link_round.pairs) == 32 for link_round in schedule)


def test_between_nodes_the_first_ranks_send_alone_and_then_all_side_by_side() -> None:
    schedule = link_rounds(nodes=2, ranks_per_node=2)
    assert [(link_round.lanes, link_round.pairs) for link_round in schedule] == [
        (1, ((0, 2),)),
        (2, ((0, 2), (1, 3))),
        (1, ((0, 1), (2, 3))),
    ]


def test_every_round_is_measured_once_a_size() -> None:
    benchmark = _benchmark(world=6, local_world=2)
    cases = benchmark.cases()
    assert len({case.id for case in cases}) == len(cases)
    trips = [case for case in cases if case.kind == "round_trip"]
    # Three nodes: 3 rounds between them and 1 inside, each measured both ways.
    assert len(trips) == 4


def test_a_pair_that_is_not_here_is_a_failed_row() -> None:
    case = _benchmark(world=4, local_world=2).cases()[0]
    (row,) = _benchmark(world=1, local_world=1).measure(case, budget_s=1.0)
    assert row.status is MeasurementStatus.FAILED
    assert "no such pair" in row.error


def test_one_rank_has_nothing_to_measure() -> None:
    benchmark = _benchmark(world=1, local_world=1)
    assert benchmark.cases() == ()
    assert benchmark.note()
