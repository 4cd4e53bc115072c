"""Which pace a rank keeps, by its device, its peers and its cores."""

from collections.abc import Sequence

from profilers.pace import BY_ITSELF, TURNS_S, Pace, choose_pace
from profilers.team import SingleRank
from tests.rows import each_row


class TwoRanks(SingleRank):
    """The first of two ranks, of which the other one is as fast."""

    world = 2
    local_world = 2

    def slowest_s(self, times_s: Sequence[float]) -> tuple[float, ...]:
        return tuple(times_s)


@each_row("team", [SingleRank(), TwoRanks()])
def test_ranks_with_accelerators_decide_by_themselves(team: SingleRank) -> None:
    assert choose_pace("cuda", team=team, takes_turns=False) is BY_ITSELF


def test_ranks_on_processors_decide_alone_in_lockstep_or_in_turns() -> None:
    assert choose_pace("cpu", team=SingleRank(), takes_turns=False) is BY_ITSELF
    team = TwoRanks()
    pace = choose_pace("cpu", team=team, takes_turns=False)
    assert pace.all_reduce_max == team.slowest_s
    assert not pace.shares_cores
    pace = choose_pace("cpu", team=TwoRanks(), takes_turns=True)
    assert pace == Pace(repeat_s=TURNS_S)
    assert pace.shares_cores
