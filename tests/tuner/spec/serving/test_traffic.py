"""The record of a traffic: what may stand together, and what is said where it may not."""

from collections.abc import Mapping
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.rows import each_row
from tuner.spec.fields import SpecFolder
from tuner.spec.serving.lengths import LengthKind
from tuner.spec.serving.traffic import ArrivalKind, Traffic

LENGTHS = {"input_tokens": 4000, "output_tokens": 1000}


def read(fields: Mapping[str, object]) -> Traffic:
    return Traffic.model_validate(fields, context=SpecFolder(folder=Path("/specs")))


def test_a_closed_loop_with_bare_numbers() -> None:
    traffic = read({"concurrency": 256, **LENGTHS, "prefix_hit": 0.5})
    assert traffic.is_closed_loop
    assert not traffic.is_replayed
    assert traffic.input_tokens is not None
    assert (traffic.input_tokens.kind, traffic.input_tokens.mean) == (LengthKind.FIXED, 4000)


def test_an_open_load_with_laws() -> None:
    traffic = read(
        {
            "rate": "120/min",
            "arrival": {"kind": "gamma", "cv": 1.5},
            "input_tokens": {"kind": "lognormal", "mean": 1000, "cv": 1.0},
            "output_tokens": 10,
        }
    )
    assert traffic.rate == 2.0
    assert traffic.arrival is not None
    assert traffic.arrival.kind is ArrivalKind.GAMMA


def test_a_trace_is_found_beside_the_spec_and_replayed() -> None:
    traffic = read({"trace": "chat.csv"})
    assert traffic.trace == Path("/specs/chat.csv")
    assert traffic.is_replayed
    assert read({"trace": "chat.csv", "rate": "2/s"}).is_replayed
    assert not read({"trace": "chat.csv", "concurrency": 4}).is_replayed
    drawn = {"trace": "chat.csv", "rate": "2/s", "arrival": {"kind": "poisson"}}
    assert not read(drawn).is_replayed


@each_row(
    ("fields", "said"),
    [
        (LENGTHS, "one of 'concurrency', 'rate' or 'trace'"),
        ({**LENGTHS, "concurrency": 1, "rate": "1/s"}, "keep one"),
        ({**LENGTHS, "concurrency": 0}, "concurrency"),
        ({**LENGTHS, "rate": 20}, "20 has no unit; write it like '20/s'"),
        ({**LENGTHS, "rate": "20"}, "has no unit"),
        ({**LENGTHS, "rate": "0/s"}, "rate"),
        ({"trace": "a.csv", "arrival": {"kind": "poisson"}}, "'arrival' needs the mean 'rate'"),
        ({"concurrency": 4, "input_tokens": 4}, "missing 'output_tokens'"),
        ({"trace": "a.csv", "input_tokens": 4}, "the trace has its own 'input_tokens'"),
        ({**LENGTHS, "concurrency": 4, "prefix_hit": 1.0}, "prefix_hit"),
        ({**LENGTHS, "rate": "1/s", "arrival": {"kind": "gamma"}}, "gamma arrivals need 'cv'"),
        (
            {**LENGTHS, "rate": "1/s", "arrival": {"kind": "on_off", "on": "3s"}},
            "on_off arrivals need 'off'",
        ),
        (
            {**LENGTHS, "rate": "1/s", "arrival": {"kind": "poisson", "cv": 2}},
            "poisson arrivals have no 'cv'",
        ),
        ({**LENGTHS, "concurency": 4}, "concurency"),
        ({"trace": "a.csv", "requests": 9}, "a replayed trace has its own number of requests"),
        ({**LENGTHS, "concurrency": 4, "requests": 0}, "requests"),
        ({**LENGTHS, "concurrency": 4, "requests": 20_001}, "less than or equal to 20000"),
    ],
)
def test_what_contradicts_itself_is_refused(fields: Mapping[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        read(fields)


def test_a_share_of_a_traffic_is_of_its_rate_its_loop_and_its_requests() -> None:
    burst = read({**LENGTHS, "concurrency": 500, "requests": 500})
    half = burst.scaled(0.5)
    assert (half.concurrency, half.requests, half.rate) == (250, 250, None)
    run = read({**LENGTHS, "rate": "40/s", "requests": 600}).scaled(0.25)
    assert (run.concurrency, run.requests, run.rate) == (None, 150, 10.0)
    assert burst.sets_its_rate
    assert run.sets_its_rate
    assert not read({**LENGTHS, "rate": "40/s"}).sets_its_rate
