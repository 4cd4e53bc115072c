"""Ranks that wait for each other: against one rank, by hand, and against the rate of prompts."""

from dataclasses import replace

import numpy as np
import pytest

from tests.expect import present
from tests.tuner.simulate.serving.test_batching import flat_times, sample_requests
from tuner.catalog.serve_rules.traits import Batching
from tuner.simulate.serving.batching import Rules, simulate
from tuner.simulate.serving.load import Requests, of_a_peer
from tuner.simulate.serving.lockstep import simulate_ranks, simulate_together

RULES = Rules(batching=Batching.CHUNKED, step_tokens=2000)


def open_load(*, rate: float, count: int = 400, seed: int = 1) -> Requests:
    """Prompts of 1,000 tokens and outputs of 200 at Poisson times."""
    arrival_s = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, count))
    return replace(sample_requests(count, inputs=1000, outputs=200), arrival_s_R=arrival_s)


def test_ranks_whose_requests_come_together_serve_them_as_one_rank_does() -> None:
    requests = sample_requests(40, inputs=700, outputs=30)
    times = flat_times(token_s=1e-5, past_s=1e-8)
    for batching in Batching:
        rules = replace(RULES, batching=batching)
        isolated = simulate(requests, times=times, rules=rules, concurrency=8)
        together = simulate_ranks(requests, times=times, rules=rules, ranks=4, concurrency=8)
        assert together.end_s_R == pytest.approx(isolated.end_s_R)
        assert together.first_token_s_R == pytest.approx(isolated.first_token_s_R)


def test_prompts_of_every_rank_delay_the_outputs_of_each() -> None:
    # A step takes 10 ms, with a prompt 110; at r requests/s a rank one of R ranks sees R r prompts
    # a second, so that a token takes 10 ms / (1 - R r 0.1 s) while they seldom meet.
    times = flat_times(step_s=0.01, token_s=1e-4)
    requests = open_load(rate=0.5)
    for ranks in (1, 2, 4):
        expected_s = 0.0101 / (1.0 - ranks * 0.5 * 0.1)
        for simulated in (simulate_ranks, simulate_together):
            served = simulated(requests, times=times, rules=RULES, ranks=ranks)
            assert float(served.tpot_s_R.mean()) == pytest.approx(expected_s, rel=0.05)


def test_an_open_load_waits_as_long_as_where_every_rank_is_simulated() -> None:
    times = flat_times(step_s=0.02, token_s=1e-4)
    # Half of a prompt's seconds are experts', which compute for all ranks.
    times = replace(times, isolated_s=[0.6 * each_s for each_s in times.linear_s])
    for batching in (Batching.CHUNKED, Batching.PREFILL_FIRST):
        rules = replace(RULES, batching=batching)
        for rate in (0.3, 1.0, 2.0):
            requests = open_load(rate=rate, seed=3)
            alone = simulate(requests, times=times, rules=rules)
            mean = simulate_ranks(requests, times=times, rules=rules, ranks=8)
            together = simulate_together(requests, times=times, rules=rules, ranks=8)
            tpot_s, ttft_s = (
                float(all_R.mean()) for all_R in (together.tpot_s_R, together.ttft_s_R)
            )
            assert float(mean.tpot_s_R.mean()) == pytest.approx(tpot_s, rel=0.2)
            assert float(mean.ttft_s_R.mean()) == pytest.approx(ttft_s, rel=0.25)
            assert tpot_s > 1.1 * float(alone.tpot_s_R.mean())


def test_ranks_that_read_no_prompts_do_not_wait() -> None:
    times = flat_times(step_s=0.01, token_s=1e-4)
    requests = open_load(rate=0.5)
    requests = replace(requests, prefilled_R=np.ones(len(requests.input_R), dtype=bool))
    served = simulate_ranks(requests, times=times, rules=RULES, ranks=8)
    assert served.end_s_R == pytest.approx(simulate(requests, times=times, rules=RULES).end_s_R)


def test_experts_compute_what_the_ranks_have_together() -> None:
    # Experts take 90 of a prompt's 100 ms where all four ranks read one, and 22.5 where one does.
    times = flat_times(step_s=0.0, token_s=1e-4)
    times = replace(times, isolated_s=[(0.1 + 0.9 / 4.0) * each_s for each_s in times.linear_s])
    assert times.together_s(0.1, 1000, others_ratio=1.0) == pytest.approx(0.1)
    assert times.together_s(0.1, 1000, others_ratio=0.0) == pytest.approx(0.0325)
    one = Requests(input_R=np.array([1000]), output_R=np.array([1]))
    assert simulate_ranks(one, times=times, rules=RULES, ranks=4).ttft_s_R[0] == pytest.approx(0.1)


def test_a_peer_gets_requests_of_the_same_lengths_and_gaps() -> None:
    requests = open_load(rate=2.0, count=50)
    requests = replace(requests, input_R=np.arange(1, 51), cached_R=np.arange(50) // 2)
    peer = of_a_peer(requests, rng=np.random.default_rng(0))
    assert sorted(peer.input_R) == sorted(requests.input_R)
    assert (peer.input_R != requests.input_R).any()
    assert peer.cached == [(tokens - 1) // 2 for tokens in peer.input_R.tolist()]
    assert present(peer.arrival_s_R)[-1] == pytest.approx(present(requests.arrival_s_R)[-1])
    turns = replace(requests, arrival_s_R=None, after_R=np.arange(50) - 1)
    assert of_a_peer(turns, rng=np.random.default_rng(0)) is turns
