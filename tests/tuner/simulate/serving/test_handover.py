"""Prefill and decode apart, against closed forms and counts by hand."""

import numpy as np
import pytest

from tuner.simulate.serving.handover import DecodeRank, decoded_s, prefilled_s, served_apart
from tuner.simulate.serving.steps import StepTimes


def steps(*, step_s: float, most: int = 64) -> StepTimes:
    """Every decode step takes as long, whatever runs."""
    return StepTimes(
        linear_s=[step_s] * (most + 2),
        head_s=[0.0] * (most + 2),
        decode_s=[[0.0, 0.0]] * (most + 1),
        past_step=1e9,
        prompt_s=[0.0, 0.0],
        prompt_step=1e9,
        scheduler_s=0.0,
        prompt_scheduler_s=0.0,
    )


@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_waiting_for_one_prefill_rank_is_that_of_m_d_1(load: float) -> None:
    rng = np.random.default_rng(5)
    arrival_s = np.cumsum(rng.exponential(1.0 / load, 400_000))
    done_s = prefilled_s(arrival_s, np.ones(len(arrival_s)), ranks=1)
    waited = float((done_s - arrival_s - 1.0).mean())
    # M/D/1: load / (2 (1 - load)) services.
    assert waited == pytest.approx(load / (2.0 * (1.0 - load)), rel=0.02)


def test_waiting_for_several_exponential_ranks_is_that_of_m_m_c() -> None:
    rng = np.random.default_rng(6)
    ranks, load = 3, 0.7
    count = 400_000
    arrival_s = np.cumsum(rng.exponential(1.0 / (load * ranks), count))
    service_s = rng.exponential(1.0, count)
    waited = float((prefilled_s(arrival_s, service_s, ranks=ranks) - arrival_s - service_s).mean())
    # Erlang C of 2.1 erlangs on 3 servers, over c mu - lambda.
    offered = load * ranks
    terms = [1.0, offered, offered**2 / 2.0]
    last = offered**3 / 6.0 / (1.0 - load)
    queued = last / (sum(terms) + last)
    assert waited == pytest.approx(queued / (ranks - offered), rel=0.02)


def test_a_lone_answer_takes_a_step_a_token_after_the_first() -> None:
    rank = DecodeRank(times=steps(step_s=0.5), most_running=4, kv_tokens=1e9)
    end_s = decoded_s(np.array([2.0]), np.array([100]), np.array([11]), rank=rank)
    assert end_s.tolist() == [7.0]


def test_sequences_beyond_the_room_wait_for_the_first_to_end() -> None:
    rank = DecodeRank(times=steps(step_s=1.0), most_running=2, kv_tokens=1e9)
    end_s = decoded_s(np.zeros(3), np.full(3, 10), np.array([3, 5, 4]), rank=rank)
    # Two run; the third starts when the first ends after two steps, and takes three.
    assert end_s.tolist() == [2.0, 4.0, 5.0]


def test_memory_holds_sequences_back_too() -> None:
    rank = DecodeRank(times=steps(step_s=1.0), most_running=8, kv_tokens=30.0)
    end_s = decoded_s(np.zeros(2), np.full(2, 10), np.array([6, 6]), rank=rank)
    assert end_s.tolist() == [5.0, 10.0]


def test_an_arrival_joins_at_the_next_step() -> None:
    rank = DecodeRank(times=steps(step_s=1.0), most_running=8, kv_tokens=1e9)
    end_s = decoded_s(np.array([0.0, 1.5]), np.full(2, 10), np.array([6, 3]), rank=rank)
    assert end_s.tolist() == [5.0, 4.0]


def test_the_first_token_is_the_prefills_and_the_rest_wait_for_the_cache() -> None:
    served = served_apart(
        arrival_s_R=np.array([0.0]),
        input_R=np.array([100]),
        output_R=np.array([3]),
        prompt_s=lambda tokens: 0.01 * tokens.astype(np.float64),
        prefill_ranks=1,
        handover_s=lambda tokens: 0.005 * tokens.astype(np.float64),
        decode_ranks=1,
        rank=DecodeRank(times=steps(step_s=1.0), most_running=4, kv_tokens=1e9),
    )
    assert served.ttft_s_R.tolist() == [1.0]
    assert served.end_s_R.tolist() == [3.5]
    assert served.tpot_s_R.tolist() == [1.25]


def test_more_ranks_never_end_later_in_all() -> None:
    rng = np.random.default_rng(7)
    arrival_s = np.cumsum(rng.exponential(0.2, 400))
    lengths = rng.integers(1, 50, 400)
    ends = [
        served_apart(
            arrival_s_R=arrival_s,
            input_R=np.full(400, 10),
            output_R=lengths,
            prompt_s=lambda tokens: np.full(len(tokens), 0.3),
            prefill_ranks=ranks,
            handover_s=lambda tokens: np.zeros(len(tokens)),
            decode_ranks=ranks,
            rank=DecodeRank(times=steps(step_s=0.05), most_running=16, kv_tokens=1e9),
        ).end_s_R.mean()
        for ranks in (2, 4, 8)
    ]
    assert ends == sorted(ends, reverse=True)
