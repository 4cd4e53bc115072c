"""Simulated waits against queues: request by request, and on average against closed forms.

A wait is the time to the first token less the request's own service. Request by request it is that
of Kiefer and Wolfowitz' recursion over the same arrivals and services, which needs no closed form;
on average it is that of Erlang, and of Pollaczek and Khinchine.
"""

from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from tests.rows import Failures
from tests.tuner.formulas import crossover_load
from tuner.catalog.serve_rules.traits import Batching
from tuner.costs.serve.queueing import mean_wait_s
from tuner.simulate.serving.batching import Rules, simulate
from tuner.simulate.serving.disaggregated import Stations, simulate_disaggregated
from tuner.simulate.serving.load import Requests
from tuner.simulate.serving.steps import StepTimes

Floats = npt.NDArray[np.float64]

SERVICE_S = 0.01
TOKEN_S = 1e-6


def flat_times(step_s: float) -> StepTimes:
    return StepTimes(
        linear_s=[step_s] * 1001,
        head_s=[0.0] * 1001,
        decode_s=[[0.0, 0.0]] * 1001,
        past_step=1e6,
        prompt_s=[0.0, 0.0],
        prompt_step=1e6,
        scheduler_s=0.0,
        prompt_scheduler_s=0.0,
    )


def arrivals(count: int, *, rate_per_s: float, seed: int) -> Floats:
    return np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate_per_s, count))


def recursed_s(arrival_s_R: Floats, service_s_R: Floats, *, servers: int) -> Floats:
    """First come, first served: the request takes the server that is free first."""
    free_s = [0.0] * servers
    waits = []
    for at_s, service_s in zip(arrival_s_R.tolist(), service_s_R.tolist(), strict=True):
        first = min(range(servers), key=free_s.__getitem__)
        start_s = max(at_s, free_s[first])
        free_s[first] = start_s + service_s
        waits.append(start_s - at_s)
    return np.array(waits)


def batched_s(arrival_s_R: Floats) -> Floats:
    """Waits of an engine whose every step of 10 ms holds one prompt."""
    count = len(arrival_s_R)
    requests = Requests(
        input_R=np.full(count, 100), output_R=np.full(count, 1), arrival_s_R=arrival_s_R
    )
    rules = Rules(batching=Batching.WHOLE, step_tokens=100)
    return simulate(requests, times=flat_times(SERVICE_S), rules=rules).ttft_s_R - SERVICE_S


def prefilled_s(arrival_s_R: Floats, tokens_R: npt.NDArray[np.int64], *, workers: int) -> Floats:
    """Waits for prefill workers that read one prompt at a time, with decode in no time."""
    count = len(arrival_s_R)
    requests = Requests(input_R=tokens_R, output_R=np.full(count, 2), arrival_s_R=arrival_s_R)
    stations = Stations(
        prefill_workers=workers,
        prefill_ranks=1,
        prompt_s=lambda tokens, busy: TOKEN_S * tokens,
        kv_transfer_s=lambda tokens: 0.0,
        decode_ranks=1000,
        decode=flat_times(1e-12),
    )
    served = simulate_disaggregated(requests, stations=stations, concurrency=0)
    return served.ttft_s_R - TOKEN_S * tokens_R


def drawn_tokens(count: int, *, seed: int) -> npt.NDArray[np.int64]:
    drawn = np.random.default_rng(seed).exponential(SERVICE_S / TOKEN_S, count)
    return np.maximum(np.rint(drawn), 1.0).astype(np.int64)


def test_one_engine_waits_as_one_server_request_by_request(failures: Failures) -> None:
    for load in (0.3, 0.8, 0.95):
        arrival_s_R = arrivals(5_000, rate_per_s=load / SERVICE_S, seed=4)
        expected = recursed_s(arrival_s_R, np.full(len(arrival_s_R), SERVICE_S), servers=1)
        with failures.of(load):
            assert batched_s(arrival_s_R) == pytest.approx(expected, abs=1e-9)


def test_prefill_workers_wait_as_servers_request_by_request(failures: Failures) -> None:
    for workers in (1, 3, 8):
        arrival_s_R = arrivals(5_000, rate_per_s=0.9 * workers / SERVICE_S, seed=5)
        tokens_R = drawn_tokens(len(arrival_s_R), seed=6)
        expected = recursed_s(arrival_s_R, np.asarray(TOKEN_S * tokens_R), servers=workers)
        found = prefilled_s(arrival_s_R, tokens_R, workers=workers)
        with failures.of(workers):
            assert found == pytest.approx(expected, abs=1e-7)


def test_mean_waits_are_those_of_m_d_1() -> None:
    arrival_s_R = arrivals(40_000, rate_per_s=0.6 / SERVICE_S, seed=0)
    found = float(batched_s(arrival_s_R).mean())
    # The closed form at the rate that was drawn, which halves the noise.
    rate = len(arrival_s_R) / float(arrival_s_R[-1])
    expected = mean_wait_s(rate_per_s=rate, service_s=SERVICE_S, service_cv2=0.0)
    assert expected == pytest.approx(0.6 * SERVICE_S / (2.0 * 0.4), rel=0.02)
    assert found == pytest.approx(expected, rel=0.02)


def test_mean_waits_are_those_of_m_m_c() -> None:
    workers = 4
    tokens_R = drawn_tokens(20_000, seed=7)
    arrival_s_R = arrivals(len(tokens_R), rate_per_s=0.6 * workers / SERVICE_S, seed=8)
    found = float(prefilled_s(arrival_s_R, tokens_R, workers=workers).mean())
    expected = mean_wait_s(
        rate_per_s=len(tokens_R) / float(arrival_s_R[-1]),
        service_s=TOKEN_S * float(tokens_R.mean()),
        servers=workers,
    )
    # Waits of so many requests scatter by 6 % around their mean, times to the first token by 2 %.
    assert found == pytest.approx(expected, rel=0.05)
    assert found + SERVICE_S == pytest.approx(expected + SERVICE_S, rel=0.02)


def test_simulated_tensor_parallelism_and_pipelines_cross_where_distserve_has_it() -> None:
    # Two devices: K times the speed in one, or two stages that take a prompt every D / 2. Below the
    # crossing of the closed forms the first answers sooner, above it the second.
    for speed_up, (ratio, tensor_wins) in product((1.2, 1.5), ((0.8, True), (1.1, False))):
        load = ratio * crossover_load(speed_up)
        arrival_s_R = arrivals(15_000, rate_per_s=load / SERVICE_S, seed=9)
        tensor_s = float(batched_s(arrival_s_R * speed_up).mean() + SERVICE_S) / speed_up
        pipeline_s = float(batched_s(2.0 * arrival_s_R).mean()) / 2.0 + SERVICE_S
        assert (tensor_s < pipeline_s) is tensor_wins, (speed_up, ratio, tensor_s, pipeline_s)
