"""Which policy a rank gets, and that the one of accelerators changes no time."""

from collections.abc import Callable, Sequence

import pytest

from profilers.noise.policy import QUIET, TURNS_S, NoisePolicy, choose_policy
from profilers.team import SingleRank
from tests.profilers.testing import FakeClock
from tests.rows import each_row


class TwoRanks(SingleRank):
    """The first of two ranks, of which the other one is as fast."""

    world = 2
    local_world = 2

    def slowest_s(self, times_s: Sequence[float]) -> tuple[float, ...]:
        return tuple(times_s)


def make_work() -> Callable[[], object]:
    return lambda: None


def choose(device_kind: str, *, team: SingleRank, takes_turns: bool = False) -> NoisePolicy:
    return choose_policy(
        device_kind, team=team, clock=FakeClock(), takes_turns=takes_turns, make_work=make_work
    )


@each_row("team", [SingleRank(), TwoRanks()])
def test_accelerators_are_quiet(team: SingleRank) -> None:
    assert choose("cuda", team=team) is QUIET


def test_only_a_single_rank_on_a_processor_has_a_sentinel() -> None:
    single = choose("cpu", team=SingleRank())
    assert single.sentinel is not None
    assert single.all_reduce_max is tuple
    assert choose("cpu", team=TwoRanks()).sentinel is None


def test_ranks_with_their_own_cores_repeat_in_lockstep() -> None:
    team = TwoRanks()
    policy = choose("cpu", team=team)
    assert policy.all_reduce_max == team.slowest_s
    assert not policy.shares_cores
    assert policy.revisits


def test_ranks_that_share_cores_repeat_for_many_turns_and_in_one_session() -> None:
    policy = choose("cpu", team=TwoRanks(), takes_turns=True)
    assert policy == NoisePolicy(repeat_s=TURNS_S, revisits=False)
    assert policy.shares_cores


def test_the_quiet_policy_changes_no_time() -> None:
    QUIET.begin_run(budget_s=1e9)
    QUIET.begin_case("gemm")
    assert QUIET.batch(5) == 5
    assert not QUIET.cools_caches
    assert QUIET.slowdown(QUIET.read_s(), QUIET.read_s(), lasted_s=1.0) == 1.0
    assert (QUIET.session_undisturbed_s, QUIET.session_slowdown) == (0.0, 1.0)
    QUIET.end_run()


def test_a_sentinel_is_calibrated_for_a_share_of_the_budget_and_read_around_repeats() -> None:
    clock = FakeClock()
    policy = choose_policy(
        "cpu",
        team=SingleRank(),
        clock=clock,
        takes_turns=False,
        make_work=lambda: lambda: clock.advance(1e-3),
    )
    policy.begin_run(budget_s=10.0)
    assert clock.now_s() == pytest.approx(0.3, rel=0.05)
    policy.begin_case("gemm")
    assert policy.batch(5) == 1
    assert policy.session_undisturbed_s == 0.0
    assert policy.slowdown(policy.read_s(), policy.read_s(), lasted_s=0.01) == pytest.approx(1.0)
    assert policy.session_undisturbed_s == pytest.approx(1e-3)
    policy.end_run()
