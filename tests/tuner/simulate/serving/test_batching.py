"""Continuous batching against a closed form, by hand, and against single steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.catalog.serve_rules.traits import Batching
from tuner.simulate.serving.batching import Rules, simulate
from tuner.simulate.serving.load import Requests, uniform_requests
from tuner.simulate.serving.steps import StepTimes


def flat_times(
    *, step_s: float = 0.01, token_s: float = 0.0, past_s: float = 0.0, sequences: int = 4096
) -> StepTimes:
    """Steps of a fixed time, plus so much per token and per token of past."""
    return StepTimes(
        linear_s=[step_s + token_s * tokens for tokens in range(40_001)],
        head_s=[0.0] * (sequences + 1),
        decode_s=[[past_s * num * past for past in (0.0, 1e6)] for num in range(sequences + 1)],
        past_step=1e6,
        prompt_s=[0.0, 0.0],
        prompt_step=1e6,
        scheduler_s=0.0,
        prompt_scheduler_s=0.0,
    )


def sample_requests(count: int, *, inputs: int, outputs: int) -> Requests:
    return Requests(input_R=np.full(count, inputs), output_R=np.full(count, outputs))


def test_waits_of_a_deterministic_server_follow_m_d_1() -> None:
    # One prompt a step of 10 ms, Poisson arrivals at 70 % load: mean wait rho s / (2 (1 - rho)),
    # and the first token comes a service time later (Pollaczek and Khinchine).
    count, service_s, load = 50_000, 0.01, 0.7
    arrival_s = np.cumsum(np.random.default_rng(0).exponential(service_s / load, count))
    requests = Requests(
        input_R=np.full(count, 100), output_R=np.full(count, 1), arrival_s_R=arrival_s
    )
    rules = Rules(batching=Batching.WHOLE, step_tokens=100)
    served = simulate(requests, times=flat_times(step_s=service_s), rules=rules)
    expected_s = service_s + load * service_s / (2.0 * (1.0 - load))
    assert float(served.ttft_s_R.mean()) == pytest.approx(expected_s, rel=0.02)


def test_two_requests_by_hand() -> None:
    # Both prompts fit into one step; 3 tokens each: the first with it, two steps more.
    rules = Rules(batching=Batching.CHUNKED, step_tokens=1000)
    served = simulate(
        sample_requests(2, inputs=100, outputs=3), times=flat_times(), rules=rules, concurrency=2
    )
    assert served.first_token_s_R == pytest.approx([0.01, 0.01])
    assert served.end_s_R == pytest.approx([0.03, 0.03])
    assert served.tpot_s_R == pytest.approx([0.01, 0.01])


def test_a_prompt_longer_than_the_budget_takes_several_steps() -> None:
    rules = Rules(batching=Batching.CHUNKED, step_tokens=100)
    assert simulate(
        sample_requests(1, inputs=250, outputs=2), times=flat_times(), rules=rules, concurrency=1
    ).first_token_s_R == pytest.approx([0.03])


def test_decode_stands_still_while_prompts_go_first() -> None:
    # The second request comes when the first has two of four tokens; its prompt takes a step.
    requests = Requests(
        input_R=np.array([100, 100]),
        output_R=np.array([4, 1]),
        arrival_s_R=np.array([0.0, 0.015]),
    )
    ends = {}
    for batching in (Batching.PREFILL_FIRST, Batching.WHOLE):
        rules = Rules(batching=batching, step_tokens=1000)
        ends[batching] = float(simulate(requests, times=flat_times(), rules=rules).end_s_R[0])
    assert ends[Batching.WHOLE] == pytest.approx(0.04)
    assert ends[Batching.PREFILL_FIRST] == pytest.approx(0.05)


def test_memory_for_one_serves_one_after_the_other() -> None:
    rules = Rules(batching=Batching.WHOLE, step_tokens=1000, kv_tokens=150)
    served = simulate(
        sample_requests(2, inputs=100, outputs=5), times=flat_times(), rules=rules, concurrency=2
    )
    assert served.first_token_s_R[1] >= served.end_s_R[0]


def test_outputs_that_outgrow_memory_start_anew_and_lose_no_token() -> None:
    rules = Rules(batching=Batching.CHUNKED, step_tokens=1000, kv_tokens=260, reserves_output=False)
    served = simulate(
        sample_requests(3, inputs=100, outputs=80), times=flat_times(), rules=rules, concurrency=3
    )
    roomy = Rules(batching=Batching.CHUNKED, step_tokens=1000)
    plain = simulate(
        sample_requests(3, inputs=100, outputs=80), times=flat_times(), rules=roomy, concurrency=3
    )
    assert served.end_s_R.max() > plain.end_s_R.max()
    assert (served.end_s_R > served.first_token_s_R).all()


def test_an_engine_that_looks_every_ten_steps_lets_requests_wait() -> None:
    requests = Requests(
        input_R=np.array([100, 100]),
        output_R=np.array([101, 1]),
        arrival_s_R=np.array([0.0, 0.025]),
    )
    waits = []
    for poll_steps in (1, 10):
        rules = Rules(batching=Batching.WHOLE, step_tokens=1000, poll_steps=poll_steps)
        waits.append(float(simulate(requests, times=flat_times(), rules=rules).ttft_s_R[1]))
    assert waits[0] == pytest.approx(0.015)
    assert waits[0] < waits[1] <= 0.1 + 1e-9


def test_what_the_prefix_cache_holds_is_attended_to_and_not_computed() -> None:
    # 300 tokens in steps of 100: three steps; with 200 of them in the cache one.
    rules = Rules(batching=Batching.CHUNKED, step_tokens=100)
    requests = Requests(input_R=np.array([300]), output_R=np.array([2]), cached_R=np.array([200]))
    plain = simulate(sample_requests(1, inputs=300, outputs=2), times=flat_times(), rules=rules)
    times = replace(flat_times(), prompt_s=[0.0, 1.0], prompt_step=1000.0)
    found = simulate(requests, times=times, rules=rules)
    assert plain.first_token_s_R == pytest.approx([0.03])
    # A(300) - A(200) at a second per thousand tokens.
    assert found.first_token_s_R == pytest.approx([0.01 + 0.1])


def test_a_prompt_that_is_cached_whole_is_refused() -> None:
    for cached in ([300], [-1], [0, 0]):
        with pytest.raises(ValueError, match="one token at least must be computed"):
            Requests(input_R=np.array([300]), output_R=np.array([2]), cached_R=np.array(cached))


def test_drafts_yield_several_tokens_a_step_and_fill_memory_as_fast() -> None:
    # 2.5 tokens a step: 99 further tokens and 0.75 beyond the end take 40 steps.
    times = replace(flat_times(), checked_tokens=4, tokens_per_step=2.5, overshoot_tokens=0.75)
    rules = Rules(batching=Batching.CHUNKED, step_tokens=1000)
    served = simulate(sample_requests(1, inputs=100, outputs=100), times=times, rules=rules)
    assert served.end_s_R == pytest.approx([0.01 + 40 * 0.01])
    tight = Rules(batching=Batching.CHUNKED, step_tokens=1000, kv_tokens=260, reserves_output=False)
    crowded = simulate(
        sample_requests(3, inputs=100, outputs=80), times=times, rules=tight, concurrency=3
    )
    roomy = simulate(
        sample_requests(3, inputs=100, outputs=80), times=times, rules=rules, concurrency=3
    )
    assert crowded.end_s_R.max() > roomy.end_s_R.max()


@settings(deadline=None, max_examples=25)
@given(
    concurrency=st.integers(1, 12),
    batching=st.sampled_from(list(Batching)),
    seed=st.integers(0, 1000),
)
def test_every_request_gets_its_tokens_in_time(
    concurrency: int, batching: Batching, seed: int
) -> None:
    requests = uniform_requests(
        3 * concurrency, input_tokens=60, output_tokens=40, least_ratio=0.5, seed=seed
    )
    times = flat_times(token_s=1e-5, past_s=1e-7)
    rules = Rules(batching=batching, step_tokens=128)
    served = simulate(requests, times=times, rules=rules, concurrency=concurrency)
    assert (served.arrival_s_R < served.first_token_s_R).all()
    # Every token after the first takes a step, and no step is shorter than an empty one.
    least_s_R = 0.01 * (requests.output_R - 1)
    assert (served.end_s_R - served.first_token_s_R >= least_s_R - 1e-9).all()


def test_a_jump_takes_as_long_as_its_steps_one_by_one() -> None:
    times = flat_times(step_s=0.01, past_s=1e-7)
    rules = Rules(batching=Batching.WHOLE, step_tokens=1000)
    served = simulate(
        sample_requests(1, inputs=100, outputs=50), times=times, rules=rules, concurrency=1
    )
    # Pasts of the 49 steps are 101, 102, ... 149.
    by_step_s = 0.01 + sum(0.01 + 1e-7 * past for past in range(101, 150))
    assert float(served.end_s_R[0]) == pytest.approx(by_step_s, rel=1e-9)


def test_more_in_flight_never_lowers_the_time_per_token() -> None:
    means = []
    for concurrency in (1, 4, 16, 64):
        requests = uniform_requests(
            256, input_tokens=100, output_tokens=50, least_ratio=0.8, seed=1
        )
        rules = Rules(batching=Batching.CHUNKED, step_tokens=512)
        times = flat_times(token_s=1e-5)
        served = simulate(requests, times=times, rules=rules, concurrency=concurrency)
        means.append(float(served.tpot_s_R.mean()))
    assert means == sorted(means)


def test_steps_with_prompts_take_at_least_their_launches() -> None:
    plain = flat_times()
    slow = replace(plain, layers_launch_s=0.5, graph_tokens=1.0)
    assert slow.prompt_step_s(1, 0.0) == plain.prompt_step_s(1, 0.0)
    assert slow.prompt_step_s(2, 0.0) >= 0.5
    assert slow.decode_step_s(1, 1.0) == plain.decode_step_s(1, 1.0)
