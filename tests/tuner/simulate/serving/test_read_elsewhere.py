"""Requests whose prompts were read elsewhere, by hand."""

import math

import numpy as np
import pytest

from tuner.catalog.serve_rules.traits import Batching
from tuner.simulate.serving.batching import Rules, simulate
from tuner.simulate.serving.disaggregated import Stations, simulate_disaggregated
from tuner.simulate.serving.load import Requests
from tuner.simulate.serving.steps import StepTimes

STEP_S = 0.01
PROMPT_S = 0.1


def times() -> StepTimes:
    """A step takes 10 ms, a prompt of 1,000 tokens 100 ms besides."""
    return StepTimes(
        linear_s=[STEP_S] * 2000,
        head_s=[0.0] * 50,
        decode_s=[[0.0, 0.0]] * 50,
        past_step=1e6,
        prompt_s=[0.0, PROMPT_S, 2.0 * PROMPT_S],
        prompt_step=1000.0,
        scheduler_s=0.0,
        prompt_scheduler_s=0.0,
    )


def requests(read: list[bool]) -> Requests:
    return Requests(
        input_R=np.array([1000, 1000]),
        output_R=np.array([3, 3]),
        arrival_s_R=np.array([0.0, 10.0]),
        prefilled_R=np.array(read),
    )


def test_an_engine_runs_them_without_reading() -> None:
    rules = Rules(batching=Batching.CHUNKED, step_tokens=1024)
    served = simulate(requests([True, False]), times=times(), rules=rules)
    assert served.ttft_s_R.tolist() == pytest.approx([0.0, STEP_S + PROMPT_S])
    assert served.end_s_R.tolist() == pytest.approx([2 * STEP_S, 10.0 + 3 * STEP_S + PROMPT_S])


def test_what_gives_its_memory_back_is_read_here_the_second_time() -> None:
    # Room for one whole sequence and the prompt of the other: the later one is sent back.
    rules = Rules(
        batching=Batching.CHUNKED, step_tokens=1024, kv_tokens=2022.0, reserves_output=False
    )
    both = Requests(
        input_R=np.array([1000, 1000]),
        output_R=np.array([30, 30]),
        arrival_s_R=np.array([0.0, 0.0]),
        prefilled_R=np.array([True, True]),
    )
    served = simulate(both, times=times(), rules=rules)
    assert float(served.end_s_R[1] - served.end_s_R[0]) > PROMPT_S


def test_decode_ranks_take_them_as_they_come() -> None:
    stations = Stations(
        prefill_workers=1,
        prefill_ranks=1,
        prompt_s=lambda tokens, busy: PROMPT_S,
        kv_transfer_s=lambda tokens: 0.0,
        decode_ranks=1,
        decode=times(),
        kv_tokens=math.inf,
    )
    served = simulate_disaggregated(requests([True, False]), stations=stations, concurrency=0)
    assert served.ttft_s_R.tolist() == pytest.approx([0.0, PROMPT_S])


def test_a_request_is_read_in_one_place() -> None:
    with pytest.raises(ValueError, match="every request is read here or elsewhere"):
        requests([True])
