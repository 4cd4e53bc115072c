"""Closed loops: who is sent next, and turns of sessions that never overtake the one before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.catalog.serve_rules.traits import Batching
from tuner.search.serve.simulation import own_sessions
from tuner.simulate.serving.batching import Rules, simulate
from tuner.simulate.serving.disaggregated import Stations, simulate_disaggregated
from tuner.simulate.serving.load import ClosedLoop, Requests, Served
from tuner.simulate.serving.shared import Phases, simulate_shared
from tuner.simulate.serving.steps import StepTimes

TIMES = StepTimes(
    linear_s=[0.01] * 6000,
    head_s=[0.0] * 600,
    decode_s=[[0.0, 0.0]] * 600,
    past_step=1e6,
    prompt_s=[0.0, 0.0],
    prompt_step=1e6,
    scheduler_s=0.0,
    prompt_scheduler_s=0.0,
)


def sample_requests(after: list[int], outputs: list[int] | None = None) -> Requests:
    count = len(after)
    return Requests(
        input_R=np.full(count, 100),
        output_R=np.array(outputs or [10] * count),
        after_R=np.array(after, dtype=np.int64),
    )


def served_by_each(requests: Requests, concurrency: int) -> dict[str, Served]:
    phases = Phases(
        isolated_prompts=TIMES,
        multiplexed_prompts=TIMES,
        isolated_steps=TIMES,
        multiplexed_steps=TIMES,
        step_tokens=1000,
        kv_tokens=1e9,
    )
    stations = Stations(
        prefill_workers=2,
        prefill_ranks=1,
        prompt_s=lambda tokens, busy: 0.02,
        kv_transfer_s=lambda tokens: 0.001,
        decode_ranks=1,
        decode=TIMES,
    )
    rules = Rules(batching=Batching.CHUNKED, step_tokens=1000)
    return {
        "batching": simulate(requests, times=TIMES, rules=rules, concurrency=concurrency),
        "shared": simulate_shared(requests, phases=phases, concurrency=concurrency),
        "apart": simulate_disaggregated(requests, stations=stations, concurrency=concurrency),
    }


def test_without_sessions_the_next_one_comes_as_one_ends() -> None:
    plain = Requests(input_R=np.full(5, 100), output_R=np.full(5, 10))
    loop = ClosedLoop(plain, concurrency=2)
    assert loop.first() == [0, 1]
    assert [loop.ended(request) for request in (1, 0, 2, 3, 4)] == [[2], [3], [4], [], []]
    assert ClosedLoop(plain, concurrency=9).first() == [0, 1, 2, 3, 4]


def test_a_turn_is_passed_over_until_the_one_before_has_ended() -> None:
    # 1 waits for 0 and 3 for 1; 2 and 4 are sessions of their own.
    loop = ClosedLoop(sample_requests([-1, 0, -1, 1, -1]), concurrency=2)
    assert loop.first() == [0, 2]
    # 3 is passed over as 2 ends, and 4 sent; then 0 frees 1, and 1 frees 3.
    assert loop.ended(2) == [4]
    assert loop.ended(0) == [1]
    # A place stays free while the only request left waits for one that is under way.
    assert loop.ended(4) == []
    assert loop.ended(1) == [3]
    assert loop.ended(3) == []


def test_places_that_stayed_free_are_taken_as_turns_get_ready() -> None:
    # Two turns continue request 0: both are sent as it ends.
    loop = ClosedLoop(sample_requests([-1, 0, 0]), concurrency=3)
    assert loop.first() == [0]
    assert loop.ended(0) == [1, 2]


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 40)), min_size=1, max_size=25),
    st.integers(1, 6),
)
def test_no_turn_starts_before_the_one_before_has_ended(
    drawn: list[tuple[int, int]], concurrency: int
) -> None:
    after = [place - 1 - back if back < place else -1 for place, (back, _) in enumerate(drawn)]
    requests = sample_requests(after, [answer for _, answer in drawn])
    failures = []
    for name, served in served_by_each(requests, concurrency).items():
        for turn, before in enumerate(after):
            if before >= 0 and served.arrival_s_R[turn] < served.end_s_R[before] - 1e-9:
                failures.append(f"{name}: {turn} before the end of {before}")
        starts = sorted((at, 1) for at in served.arrival_s_R)
        ends = sorted((at, -1) for at in served.end_s_R)
        under_way = most = 0
        for _, change in sorted(starts + ends):
            under_way += change
            most = max(most, under_way)
        if most > concurrency:
            failures.append(f"{name}: {most} under way")
    assert failures == []


def test_one_session_is_served_turn_by_turn() -> None:
    # Prompt and first token 10 ms, nine steps more: 100 ms a turn, one after the other.
    served = served_by_each(sample_requests([-1, 0, 1]), 3)["batching"]
    assert served.end_s_R == pytest.approx([0.1, 0.2, 0.3])
    free = served_by_each(sample_requests([-1, -1, -1]), 3)["batching"]
    assert free.end_s_R == pytest.approx([0.1, 0.1, 0.1])


def test_a_turn_before_the_first_is_refused() -> None:
    with pytest.raises(ValueError, match="a turn comes after the one before"):
        sample_requests([-1, 1])


def test_a_rank_gets_whole_sessions() -> None:
    # Sessions 0 (requests 0, 2, 5), 1 (1, 4) and 2 (3): every second one is 0 and 2.
    after = np.array([-1, -1, 0, -1, 1, 2])
    assert own_sessions(after, every=2).tolist() == [0, 2, 3, 5]
    assert own_sessions(after, every=1).tolist() == [0, 1, 2, 3, 4, 5]
