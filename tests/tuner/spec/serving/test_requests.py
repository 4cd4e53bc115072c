"""Drawn and replayed requests: rates, burstiness, pairs and determinism."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.expect import present
from tests.rows import each_row
from tuner.errors import SpecError
from tuner.spec.serving.lengths import LengthKind, LengthLaw
from tuner.spec.serving.requests import TrafficRequests, arrivals_s, sample_requests
from tuner.spec.serving.traffic import Arrival, ArrivalKind, Traffic
from tuner.spec.serving.turns import NONE, Sessions

PROMPTS = LengthLaw(kind=LengthKind.UNIFORM, low=10, high=20)
OUTPUTS = LengthLaw(kind=LengthKind.FIXED, mean=5)
TRACE = "Timestamp,Request tokens,Response tokens\n" + "".join(
    f"{2 * number},{number + 1},{number + 2}\n" for number in range(11)
)
Write = Callable[[str], Path]

CONSTANT = Arrival(kind=ArrivalKind.CONSTANT)
POISSON = Arrival(kind=ArrivalKind.POISSON)
BURSTY = Arrival(kind=ArrivalKind.GAMMA, cv=3.0)
STEADY = Arrival(kind=ArrivalKind.GAMMA, cv=0.2)
ON_OFF = Arrival(kind=ArrivalKind.ON_OFF, on=2.0, off=6.0)


def drawn(traffic: Traffic, *, count: int = 1000, seed: int = 0) -> TrafficRequests:
    return sample_requests(traffic, count=count, rng=np.random.default_rng(seed))


@each_row(
    ("arrival", "cv"),
    [(POISSON, 1.0), (BURSTY, 3.0), (STEADY, 0.2), (CONSTANT, 0.0), (ON_OFF, None)],
)
def test_arrivals_have_the_requested_rate_and_spread(arrival: Arrival, cv: float | None) -> None:
    gaps = np.diff(arrivals_s(arrival, rate_per_s=8.0, count=200_000, rng=np.random.default_rng(1)))
    assert np.all(gaps >= 0.0)
    assert 1.0 / gaps.mean() == pytest.approx(8.0, rel=0.05)
    if cv is not None:
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03, abs=1e-6)


def test_on_off_arrivals_are_an_interrupted_poisson_process() -> None:
    gaps = np.diff(arrivals_s(ON_OFF, rate_per_s=8.0, count=400_000, rng=np.random.default_rng(2)))
    # Rate 32 while on. A silence of mean 6 s follows an arrival with chance (1/2) / (1/2 + 32).
    assert np.median(gaps) == pytest.approx(np.log(2) / 32, rel=0.05)
    assert np.count_nonzero(gaps > 1.0) / len(gaps) == pytest.approx(
        0.5 / 32.5 * np.exp(-1 / 6), rel=0.05
    )
    rng = np.random.default_rng(3)
    first = [arrivals_s(ON_OFF, rate_per_s=1000.0, count=1, rng=rng)[0] for _ in range(2000)]
    assert np.mean(np.array(first) > 0.05) == pytest.approx(0.75, abs=0.04)


def test_a_closed_loop_has_lengths_and_no_times() -> None:
    result = drawn(Traffic(concurrency=4, input_tokens=PROMPTS, output_tokens=OUTPUTS))
    assert result.arrival_s_N is None
    assert (result.input_tokens_N.min(), result.input_tokens_N.max()) == (10, 20)
    assert set(result.output_tokens_N.tolist()) == {5}


def test_equal_seeds_give_equal_requests() -> None:
    traffic = Traffic(rate=3.0, input_tokens=PROMPTS, output_tokens=OUTPUTS)
    one, same, other = (drawn(traffic, seed=seed) for seed in (7, 7, 8))
    assert one.arrival_s_N is not None
    assert np.array_equal(one.arrival_s_N, present(same.arrival_s_N))
    assert np.array_equal(one.input_tokens_N, same.input_tokens_N)
    assert not np.array_equal(one.arrival_s_N, present(other.arrival_s_N))


def test_a_trace_is_replayed_in_order_and_stretched_by_a_rate(write: Write) -> None:
    result = drawn(Traffic(trace=write(TRACE)))
    assert present(result.arrival_s_N).tolist() == [2.0 * number for number in range(11)]
    assert result.input_tokens_N.tolist() == list(range(1, 12))
    assert len(drawn(Traffic(trace=write(TRACE)), count=3).input_tokens_N) == 3
    # 10 gaps in 20 s are 0.5/s; at 2/s time runs four times as fast
    result = drawn(Traffic(trace=write(TRACE), rate=2.0))
    assert present(result.arrival_s_N).tolist() == pytest.approx(
        [0.5 * number for number in range(11)]
    )
    text = "Timestamp,Request tokens,Response tokens\n" + "3,1,1\n" * 4
    with pytest.raises(SpecError, match="arrive at once"):
        drawn(Traffic(trace=write(text), rate=2.0))


@each_row("change", [{"concurrency": 3}, {"rate": 5.0, "arrival": POISSON}])
def test_lengths_of_a_trace_are_drawn_in_pairs(write: Write, change: dict[str, object]) -> None:
    result = drawn(Traffic.model_validate({"trace": write(TRACE), **change}))
    assert len(result.input_tokens_N) == 1000
    assert np.array_equal(result.output_tokens_N, result.input_tokens_N + 1)
    assert len(set(result.input_tokens_N.tolist())) == 11


@each_row("count", [0, 10**9])
def test_no_requests_and_too_many_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="between 1 and"):
        drawn(Traffic(concurrency=1, input_tokens=PROMPTS, output_tokens=OUTPUTS), count=count)


# Turns of sessions, told by the blocks of prompts.


def test_a_turn_continues_the_latest_prompt_that_is_its_beginning() -> None:
    sessions = Sessions()
    rows = [
        # 1100 tokens: two whole blocks, 1 and 2, and 76 tokens more in 3.
        ([1, 2, 3], 1100, 300, NONE),
        # Another conversation with the same first block, whose own is 50.
        ([1, 50], 1024, 10, NONE),
        # 1400 tokens and more begin with all whole blocks of the first: its next turn.
        ([1, 2, 4], 1500, 100, 0),
        # The same blocks, but no room for the answer: a copy, not a turn.
        ([1, 2, 4], 1399, 100, NONE),
        # Continues the second request.
        ([1, 50, 51, 52], 2048, 10, 1),
        # The whole blocks of requests 2 and 3 are the first one's, which an edit continues again.
        ([1, 2, 9, 10], 2000, 10, 0),
        # Ends with block 1, which was there before: no session of its own, and no turn.
        ([1], 512, 10, NONE),
        ([1, 60, 61], 1300, 10, NONE),
        # Below one block, and none recorded: of no session.
        ([7], 100, 10, NONE),
        ([], 4000, 10, NONE),
    ]
    result = [
        sessions.add(blocks, input_tokens=tokens, output_tokens=output)
        for blocks, tokens, output, _ in rows
    ]
    assert result == [before for *_, before in rows]


def test_a_closed_loop_takes_a_trace_in_its_order_where_it_names_blocks(tmp_path: Path) -> None:
    rows = [([1, 2], 1024, 100), ([9], 512, 10), ([1, 2, 3], 1200, 10), ([1, 2, 3, 4], 1600, 10)]
    lines = [
        {"timestamp": 0, "input_length": tokens, "output_length": output, "hash_ids": blocks}
        for blocks, tokens, output in rows
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    rng = np.random.default_rng(0)
    result = sample_requests(Traffic(trace=path, concurrency=2), count=100, rng=rng)
    assert result.arrival_s_N is None
    assert result.input_tokens_N.tolist() == [1024, 512, 1200, 1600]
    # The whole blocks of 1200 tokens are 1 and 2, the first one's: both others continue that.
    assert present(result.after_N).tolist() == [-1, -1, 0, 0]
    few = sample_requests(Traffic(trace=path, concurrency=2), count=3, rng=rng)
    assert few.input_tokens_N.tolist() == [1024, 512, 1200]
    path.write_text("Timestamp,Request tokens,Response tokens\n1,2,3\n1,2,3\n")
    drawn = sample_requests(Traffic(trace=path, concurrency=2), count=100, rng=rng)
    assert drawn.after_N is None
    assert len(drawn.input_tokens_N) == 100
