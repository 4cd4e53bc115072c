"""Two servers on one device, by hand and against the closed form of one server."""

import numpy as np
import pytest

from tuner.simulate.serving.load import Requests
from tuner.simulate.serving.shared import Phases, simulate_shared
from tuner.simulate.serving.steps import StepTimes

STEP_S = 0.01
PROMPT_S = 0.1


def times(step_s: float, prompt_s: float) -> StepTimes:
    """A step takes so long, a prompt of 1,000 tokens so much besides."""
    return StepTimes(
        linear_s=[step_s] * 2000,
        head_s=[0.0] * 600,
        decode_s=[[0.0, 0.0]] * 600,
        past_step=1e6,
        prompt_s=[0.0, prompt_s, 2.0 * prompt_s],
        prompt_step=1000.0,
        scheduler_s=0.0,
        prompt_scheduler_s=0.0,
    )


def phases(*, slower: float = 2.0, kv_tokens: float = 1e9) -> Phases:
    return Phases(
        isolated_prompts=times(0.0, PROMPT_S),
        multiplexed_prompts=times(0.0, slower * PROMPT_S),
        isolated_steps=times(STEP_S, 0.0),
        multiplexed_steps=times(slower * STEP_S, 0.0),
        step_tokens=1500,
        kv_tokens=kv_tokens,
    )


def test_an_isolated_phase_has_the_whole_device() -> None:
    one = Requests(input_R=np.array([1000]), output_R=np.array([11]), arrival_s_R=np.array([0.0]))
    served = simulate_shared(one, phases=phases())
    assert served.ttft_s_R[0] == pytest.approx(PROMPT_S)
    assert served.tpot_s_R[0] == pytest.approx(STEP_S)


def test_both_are_slower_while_they_share_it() -> None:
    # The second comes while the first answers: 200 ms beside ten steps of 20 ms.
    two = Requests(
        input_R=np.array([1000, 1000]),
        output_R=np.array([101, 2]),
        arrival_s_R=np.array([0.0, 0.1]),
    )
    served = simulate_shared(two, phases=phases())
    assert served.ttft_s_R[1] == pytest.approx(2.0 * PROMPT_S)
    assert served.end_s_R[0] == pytest.approx(PROMPT_S + 10 * 2.0 * STEP_S + 90 * STEP_S)


def test_a_prompt_waits_for_memory() -> None:
    two = Requests(
        input_R=np.array([1000, 1000]),
        output_R=np.array([11, 11]),
        arrival_s_R=np.array([0.0, 0.0]),
    )
    served = simulate_shared(two, phases=phases(kv_tokens=1500.0))
    assert served.first_token_s_R[1] == pytest.approx(served.end_s_R[0] + PROMPT_S)


def test_a_batch_holds_what_its_budget_takes() -> None:
    short = Requests(
        input_R=np.array([700, 700, 700]),
        output_R=np.array([1, 1, 1]),
        arrival_s_R=np.zeros(3),
    )
    served = simulate_shared(short, phases=phases())
    assert served.first_token_s_R[0] == served.first_token_s_R[1] < served.first_token_s_R[2]


def test_isolated_prompts_wait_as_in_m_d_1() -> None:
    # Answers of one token leave one server of 100 ms, one prompt at a time: rho s / (2 (1 - rho)).
    count, load = 25_000, 0.6
    rng = np.random.default_rng(3)
    alone = Requests(
        input_R=np.full(count, 1000),
        output_R=np.ones(count, dtype=np.int64),
        arrival_s_R=np.cumsum(rng.exponential(PROMPT_S / load, count)),
    )
    served = simulate_shared(alone, phases=phases())
    wait_s = load * PROMPT_S / (2.0 * (1.0 - load))
    assert float(served.ttft_s_R.mean()) == pytest.approx(PROMPT_S + wait_s, rel=0.02)


def test_a_closed_loop_keeps_so_many_in_flight() -> None:
    count = 300
    loop = Requests(input_R=np.full(count, 1000), output_R=np.full(count, 101))
    served = simulate_shared(loop, phases=phases(), concurrency=3)
    open_at = (served.arrival_s_R[:, None] <= served.arrival_s_R) & (
        served.arrival_s_R < served.end_s_R[:, None]
    )
    assert int(open_at.sum(axis=0).max()) == 3
