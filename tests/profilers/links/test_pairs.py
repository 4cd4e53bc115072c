"""Which messages are timed; two ranks really send in tests/profilers/test_session.py."""

from pathlib import Path

from profilers.benchmark import Setting
from profilers.links.pairs import PairBench, meetings
from profilers.records import Status
from profilers.team import Alone
from profilers.timing import HostClock


class Nodes(Alone):
    """The first of several ranks that are not connected."""

    def __init__(self, *, world: int, local_world: int) -> None:
        self.world = world
        self.local_world = local_world


def _bench(*, world: int, local_world: int) -> PairBench:
    team = Nodes(world=world, local_world=local_world)
    setting = Setting(
        device="cpu", dtypes=("fp32",), team=team, clock=HostClock(), directory=Path()
    )
    return PairBench(setting=setting)


def test_64_nodes_of_one_rank_take_63_rounds() -> None:
    found = meetings(nodes=64, ranks_per_node=1)
    assert len(found) == 63
    assert all(len(meeting.pairs) == 32 for meeting in found)


def test_between_nodes_the_first_ranks_send_alone_and_then_all_side_by_side() -> None:
    found = meetings(nodes=2, ranks_per_node=2)
    assert [(meeting.lanes, meeting.pairs) for meeting in found] == [
        (1, ((0, 2),)),
        (2, ((0, 2), (1, 3))),
        (1, ((0, 1), (2, 3))),
    ]


def test_every_round_is_asked_for_once_a_size() -> None:
    bench = _bench(world=6, local_world=2)
    cases = bench.cases()
    assert len({case.id for case in cases}) == len(cases)
    trips = [case for case in cases if case.kind == "round_trip"]
    # Three nodes: 3 rounds between them and 1 inside, each measured both ways.
    assert len(trips) == 4


def test_a_pair_that_is_not_here_is_a_failed_row() -> None:
    case = _bench(world=4, local_world=2).cases()[0]
    (row,) = _bench(world=1, local_world=1).measure(case, budget_s=1.0)
    assert row.status is Status.FAILED
    assert "no such pair" in row.error


def test_one_rank_has_nothing_to_measure() -> None:
    bench = _bench(world=1, local_world=1)
    assert bench.cases() == ()
    assert bench.note()
