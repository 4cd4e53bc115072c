"""Prefill and decode apart, against the closed form of several servers."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tuner.simulate.serving.disaggregated import Stations, simulate_disaggregated
from tuner.simulate.serving.load import Requests
from tuner.simulate.serving.steps import StepTimes

STEP_S = 0.01
SHORT_STEP_S = 1e-5


def stations(
    *,
    workers: int,
    decode_ranks: int,
    ranks: int = 1,
    step_s: float = STEP_S,
    kv_transfer_s: float = 0.0,
    kv_tokens: float = math.inf,
    most_running: float = math.inf,
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
        kv_transfer_s=lambda tokens: kv_transfer_s,
        decode_ranks=decode_ranks,
        decode=times,
        kv_tokens=kv_tokens,
        most_running=most_running,
    )


@pytest.mark.parametrize("count", [40_000, pytest.param(200_000, marks=pytest.mark.slow)])
def test_waits_for_prefill_follow_m_m_c(count: int) -> None:
    # Poisson arrivals, exponential prompts of 10 ms on average, half the load. Erlang's C formula:
    # wait = C(c, a) / (c mu - lambda), a = lambda / mu.
    service_s, load = 0.01, 0.5
    found, expected = [], []
    for servers in (1, 2, 4):
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
        expected.append((last / (sum(terms) + last)) / (servers / service_s - rate) + service_s)
        found.append(float(served.ttft_s_R.mean()))
    assert found == pytest.approx(expected, rel=0.02)


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


@pytest.mark.parametrize(
    ("count", "loads"),
    [
        (20_000, (0.3, 0.6)),
        pytest.param(100_000, (0.3, 0.6, 0.8), marks=pytest.mark.slow),
    ],
)
def test_waits_for_one_prefill_worker_follow_m_d_1(count: int, loads: tuple[float, ...]) -> None:
    # Pollaczek and Khinchine with even service of 10 ms: load / (2 (1 - load)) services.
    service_s, waited = 0.01, []
    for load in loads:
        rng = np.random.default_rng(5)
        requests = Requests(
            input_R=np.full(count, 10_000),
            output_R=np.full(count, 2),
            arrival_s_R=np.cumsum(rng.exponential(service_s / load, count)),
        )
        both = stations(workers=1, decode_ranks=64, step_s=SHORT_STEP_S)
        served = simulate_disaggregated(requests, stations=both, concurrency=0)
        waited.append((float(served.ttft_s_R.mean()) - service_s) / service_s)
    assert waited == pytest.approx([load / (2.0 * (1.0 - load)) for load in loads], rel=0.03)


def test_the_first_token_waits_for_the_cache_to_come_over() -> None:
    # A prompt of 1 ms and a KV transfer of 5 ms; two more tokens take a step of 10 ms each.
    requests = Requests(input_R=np.array([1000]), output_R=np.array([3]))
    both = stations(workers=1, decode_ranks=1, kv_transfer_s=0.005)
    served = simulate_disaggregated(requests, stations=both, concurrency=1)
    assert served.ttft_s_R.tolist() == pytest.approx([0.006])
    assert served.tpot_s_R.tolist() == pytest.approx([0.01])


@pytest.mark.parametrize(("most_running", "kv_tokens"), [(2.0, math.inf), (math.inf, 2200.0)])
def test_sequences_beyond_the_room_wait_for_the_first_to_end(
    most_running: float, kv_tokens: float
) -> None:
    # Three prompts of 1 ms on three workers; two run, and the third joins when the first ends.
    requests = Requests(input_R=np.full(3, 1000), output_R=np.array([3, 5, 4]))
    both = stations(workers=3, decode_ranks=1, most_running=most_running, kv_tokens=kv_tokens)
    served = simulate_disaggregated(requests, stations=both, concurrency=3)
    assert served.first_token_s_R == pytest.approx([0.001, 0.001, 0.021])
    assert served.end_s_R == pytest.approx([0.021, 0.041, 0.051])


def test_short_prompts_fill_ranks_up_to_the_longest() -> None:
    # Two ranks: 1000 tokens beside 300 + 300 take 1 ms; 600 more would not fit, and take 0.6 ms.
    requests = Requests(
        input_R=np.array([1000, 300, 300, 600]), output_R=np.full(4, 2), arrival_s_R=np.zeros(4)
    )
    both = stations(workers=1, decode_ranks=4, ranks=2, step_s=SHORT_STEP_S)
    served = simulate_disaggregated(requests, stations=both, concurrency=0)
    assert served.first_token_s_R == pytest.approx([1e-3, 1e-3, 1e-3, 1.6e-3], abs=3e-5)


def test_decode_instances_that_draft_take_fewer_steps() -> None:
    # 40 further tokens at 2 a step are 20 steps instead of 40.
    requests = Requests(input_R=np.array([1000]), output_R=np.array([41]))
    plain = stations(workers=1, decode_ranks=1)
    drafted = replace(plain, decode=replace(plain.decode, checked_tokens=2, tokens_per_step=2.0))
    spans = [
        float((served.end_s_R - served.first_token_s_R)[0])
        for served in (
            simulate_disaggregated(requests, stations=each, concurrency=1)
            for each in (plain, drafted)
        )
    ]
    assert spans == pytest.approx([40 * STEP_S, 20 * STEP_S])


def test_a_pipeline_begins_the_next_prompt_when_its_longest_stage_is_free() -> None:
    # Prompts of 1 ms in two stages of 0.5 ms: the second ends half a prompt after the first.
    requests = Requests(
        input_R=np.array([1000, 1000]), output_R=np.array([2, 2]), arrival_s_R=np.zeros(2)
    )
    both = stations(workers=1, decode_ranks=8, step_s=SHORT_STEP_S)
    for slot_ratio, second_s in ((1.0, 2e-3), (0.5, 1.5e-3)):
        piped = replace(both, prefill_slot_ratio=slot_ratio)
        served = simulate_disaggregated(requests, stations=piped, concurrency=0)
        assert served.first_token_s_R == pytest.approx([1e-3, second_s], abs=SHORT_STEP_S)
