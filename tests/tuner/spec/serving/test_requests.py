"""Drawn and replayed requests: rates, burstiness, pairs and determinism."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.rows import each_row
from tuner.errors import SpecError
from tuner.spec.serving.lengths import LengthKind, LengthLaw
from tuner.spec.serving.requests import TrafficRequests, arrivals_s, sample_requests
from tuner.spec.serving.traffic import Arrival, ArrivalKind, Traffic

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
    times = arrivals_s(arrival, rate_per_s=8.0, count=200_000, rng=np.random.default_rng(1))
    gaps = np.diff(times)
    assert np.all(gaps >= 0.0)
    assert 1.0 / gaps.mean() == pytest.approx(8.0, rel=0.05)
    if cv is not None:
        assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.03, abs=1e-6)


def test_on_off_arrivals_are_an_interrupted_poisson_process() -> None:
    times = arrivals_s(ON_OFF, rate_per_s=8.0, count=400_000, rng=np.random.default_rng(2))
    gaps = np.diff(times)
    # Rate 32 while on. A silence of mean 6 s follows an arrival with chance (1/2) / (1/2 + 32).
    assert np.median(gaps) == pytest.approx(np.log(2) / 32, rel=0.05)
    assert np.count_nonzero(gaps > 1.0) / len(gaps) == pytest.approx(
        0.5 / 32.5 * np.exp(-1 / 6), rel=0.05
    )


def test_on_off_arrivals_begin_off_as_often_as_they_are_off() -> None:
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
    assert same.arrival_s_N is not None
    assert other.arrival_s_N is not None
    assert np.array_equal(one.arrival_s_N, same.arrival_s_N)
    assert np.array_equal(one.input_tokens_N, same.input_tokens_N)
    assert not np.array_equal(one.arrival_s_N, other.arrival_s_N)


def test_a_trace_is_replayed_in_order_up_to_its_end(write: Write) -> None:
    result = drawn(Traffic(trace=write(TRACE)))
    assert result.arrival_s_N is not None
    assert result.arrival_s_N.tolist() == [2.0 * number for number in range(11)]
    assert result.input_tokens_N.tolist() == list(range(1, 12))
    assert len(drawn(Traffic(trace=write(TRACE)), count=3).input_tokens_N) == 3


def test_a_rate_stretches_time_and_drops_no_request(write: Write) -> None:
    # 10 gaps in 20 s are 0.5/s; at 2/s time runs four times as fast
    result = drawn(Traffic(trace=write(TRACE), rate=2.0))
    assert result.arrival_s_N is not None
    assert result.arrival_s_N.tolist() == pytest.approx([0.5 * number for number in range(11)])


@each_row("change", [{"concurrency": 3}, {"rate": 5.0, "arrival": POISSON}])
def test_lengths_of_a_trace_are_drawn_in_pairs(write: Write, change: dict[str, object]) -> None:
    result = drawn(Traffic.model_validate({"trace": write(TRACE), **change}))
    assert len(result.input_tokens_N) == 1000
    assert np.array_equal(result.output_tokens_N, result.input_tokens_N + 1)
    assert len(set(result.input_tokens_N.tolist())) == 11


def test_requests_that_all_come_at_once_have_no_rate_to_stretch(write: Write) -> None:
    text = "Timestamp,Request tokens,Response tokens\n" + "3,1,1\n" * 4
    with pytest.raises(SpecError, match="arrive at once"):
        drawn(Traffic(trace=write(text), rate=2.0))


@each_row("count", [0, 10**9])
def test_no_requests_and_too_many_are_refused(count: int) -> None:
    with pytest.raises(ValueError, match="between 1 and"):
        drawn(Traffic(concurrency=1, input_tokens=PROMPTS, output_tokens=OUTPUTS), count=count)
