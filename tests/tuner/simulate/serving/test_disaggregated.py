"""Prefill and decode apart, against the closed form of several servers."""

import math

import numpy as np
import pytest

from tuner.simulate.serving.disaggregated import Stations, simulate_disaggregated
from tuner.simulate.serving.load import Requests
from tuner.simulate.serving.steps import StepTimes

STEP_S = 0.01
SHORT_STEP_S = 1e-5


def stations(
    *, workers: int, decode_ranks: int, ranks: int = 1, step_s: float = STEP_S
) -> Stations:
    times = StepTimes(
        linear_s=[step_s] * 2000,
        head_s=[0.0] * 2000,
        decode_s=[[0.0, 0.0]] * 2000,
        past_step=1e6,
        prompt_s=[0.0, 0.0],
        prompt_step=1e6,
        scheduler_s=0.0,
        prompt_scheduler_s=0.0,
    )
    return Stations(
        prefill_workers=workers,
        prefill_ranks=ranks,
        prompt_s=lambda tokens, busy: 1e-6 * tokens,
        handover_s=lambda tokens: 0.0,
        decode_ranks=decode_ranks,
        decode=times,
    )


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_waits_for_prefill_follow_m_m_c(servers: int) -> None:
    # Poisson arrivals, exponential prompts of 10 ms on average, half the load. Erlang's C formula:
    # wait = C(c, a) / (c mu - lambda), a = lambda / mu.
    count, service_s, load = 200_000, 0.01, 0.5
    rate = load * servers / service_s
    rng = np.random.default_rng(2)
    requests = Requests(
        input_R=np.maximum(np.rint(rng.exponential(10_000.0, count)), 1).astype(np.int64),
        output_R=np.full(count, 2),
        arrival_s_R=np.cumsum(rng.exponential(1.0 / rate, count)),
    )
    both = stations(workers=servers, decode_ranks=64, step_s=SHORT_STEP_S)
    served = simulate_disaggregated(requests, stations=both, concurrency=0)
    offered = load * servers
    terms = [offered**n / math.factorial(n) for n in range(servers)]
    last = offered**servers / math.factorial(servers) / (1.0 - load)
    waits = last / (sum(terms) + last)
    expected_s = waits / (servers / service_s - rate) + service_s
    assert float(served.ttft_s_R.mean()) == pytest.approx(expected_s, rel=0.02)


def test_a_closed_loop_by_hand() -> None:
    # Two prompts of 1 ms share one prefill rank; 3 tokens each: two steps of decode.
    requests = Requests(input_R=np.array([1000, 1000]), output_R=np.array([3, 3]))
    served = simulate_disaggregated(
        requests, stations=stations(workers=1, decode_ranks=1), concurrency=1
    )
    assert served.first_token_s_R[0] == pytest.approx(0.001)
    assert served.end_s_R[0] == pytest.approx(0.021)
    assert served.arrival_s_R[1] == pytest.approx(0.021)


def test_every_request_is_served_once() -> None:
    requests = Requests(input_R=np.full(50, 500), output_R=np.full(50, 20))
    served = simulate_disaggregated(
        requests, stations=stations(workers=2, decode_ranks=2), concurrency=8
    )
    assert len(served.end_s_R) == 50
    assert (served.end_s_R > served.first_token_s_R).all()


def test_ranks_of_a_worker_read_together() -> None:
    # Of four prompts of 1 ms the first is read alone, as the others come while it is read.
    requests = Requests(
        input_R=np.full(4, 1000),
        output_R=np.full(4, 2),
        arrival_s_R=np.array([0.0, 1e-4, 2e-4, 3e-4]),
    )
    both = stations(workers=1, decode_ranks=4, ranks=2, step_s=SHORT_STEP_S)
    served = simulate_disaggregated(requests, stations=both, concurrency=0)
    assert served.first_token_s_R == pytest.approx([1e-3, 2e-3, 2e-3, 3e-3], abs=3e-5)
