"""Simulated traffic: queueing, tails, prefixes, and what clients see beside the engine's steps."""

from dataclasses import replace

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.search.serve.testing import iteration, serving_pool
from tuner.config.serve import Role
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.speculative import Drafting
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.search.serve.demand import build_demand
from tuner.search.serve.mixed_batches import prompt_time
from tuner.search.serve.modes.aggregated import simulate_aggregated_mode
from tuner.search.serve.options import Option, ServingPool, most_running
from tuner.search.serve.simulation import (
    InstanceGroup,
    SimulationResult,
    latency_of,
    sample_rank_requests,
)
from tuner.simulate.serving.client import ROUNDS
from tuner.spec.serving.goal import ServeGoal

TAIL = {"kind": "pareto_tailed", "mean": 250, "cv": 1.0, "tail_ratio": 0.05, "tail_index": 1.3}


def goal_of(engine: str = "vllm", **traffic: object) -> ServeGoal:
    stated = {"rate": 1.0, "input_tokens": 2000, "output_tokens": 300} | traffic
    return ServeGoal.model_validate(
        {
            "kind": "serve",
            "engine": {"name": engine},
            "traffic": {name: value for name, value in stated.items() if value is not None},
        }
    )


def option_of(iteration: Iteration, serving_pool: ServingPool, **fields: object) -> Option:
    plain = Option(
        serving_pool=serving_pool,
        role=Role.AGGREGATED,
        degrees=iteration.degrees,
        iteration=iteration,
        running=64,
        rate_per_s=1.0,
        ttft_s=0.0,
        tpot_s=0.0,
        kv_tokens=400_000.0,
        step_tokens=8192,
        is_chunked=True,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]  # named by the tests


def simulated(option: Option, goal: ServeGoal, *, longest: int = 32768) -> SimulationResult:
    demand = build_demand(goal, longest=longest)
    return simulate_aggregated_mode(
        (InstanceGroup(option=option, count=1),), goal=goal, demand=demand
    )


@each_row(("engine", "client_s"), [("vllm", 15e-3), ("sglang", 10e-3)])
def test_a_lone_request_waits_for_its_prompt_its_steps_and_its_client(
    engine: str, client_s: float
) -> None:
    own, goal = iteration(engine=engine), goal_of(engine, rate=0.001)
    found = simulated(option_of(own, serving_pool()), goal)
    prompt_s = prompt_time(own, build_demand(goal, longest=32768), step_tokens=8192).latency_s
    tpot_s = float(found.tpot_s_R.mean())
    assert found.ttft_s_R.mean() == pytest.approx(prompt_s + 1.5 * tpot_s + client_s, rel=0.02)


def test_a_closed_loop_sends_ten_rounds_and_pauses_between_them() -> None:
    goal = goal_of(
        concurrency=7, rate=None, input_tokens={"kind": "uniform", "low": 80, "high": 100}
    )
    demand = build_demand(goal, longest=4096)
    found = sample_rank_requests(goal, demand, count=ROUNDS * 7, every=1, most_tokens=1e6)
    assert len(found.input_R) == 70
    assert found.delay_s_R is not None
    assert found.arrival_s_R is None
    # Every quantile once: 21 values in 70 draws, mean 90.
    assert found.input_R.mean() == pytest.approx(90.0, abs=0.2)
    assert (found.input_R.min(), found.input_R.max()) == (80, 100)


def test_few_requests_have_the_mean_and_the_tail_of_many() -> None:
    goal = goal_of(output_tokens=TAIL)
    asked = build_demand(goal, longest=32768)
    few = sample_rank_requests(goal, asked, count=200, every=1, most_tokens=1e6).output_R
    assert few.mean() == pytest.approx(asked.output_tokens, rel=0.15)
    # Beyond 19 in 20 the law is Pareto's: one in 400 is 20^(1 / 1.3) = 10 times as long.
    assert few.max() > 8 * np.quantile(few, 0.95)


def test_no_request_exceeds_what_a_rank_holds() -> None:
    goal = goal_of(output_tokens=TAIL)
    found = sample_rank_requests(
        goal, build_demand(goal, longest=32768), count=200, every=1, most_tokens=3000.0
    )
    assert (found.input_R + found.output_R).max() <= 3000


def test_a_heavy_tail_lowers_the_batch_and_lengthens_the_last_percentile() -> None:
    cache = 40_000.0
    goal = goal_of(output_tokens=TAIL, rate=3.0)
    tailed = build_demand(goal, longest=32768)
    level = goal_of(output_tokens=round(tailed.output_tokens), rate=3.0)
    fixed = build_demand(level, longest=32768)
    batches = [
        int(most_running(cache, one, traits=ENGINE_TRAITS["sglang"])) for one in (tailed, fixed)
    ]
    assert batches[0] < 0.7 * batches[1]
    # With the batch of the mean, what is simulated says what the tail costs.
    own = iteration(engine="sglang")
    option = option_of(own, serving_pool(), running=batches[1], kv_tokens=cache)
    with_tail, without = simulated(option, goal), simulated(option, level)
    assert latency_of(with_tail.ttft_s_R).p90 > 1.4 * latency_of(without.ttft_s_R).p90
    assert latency_of(with_tail.ttft_s_R).p99 > 1.2 * latency_of(without.ttft_s_R).p99


def test_a_prefix_that_is_cached_is_not_read_again() -> None:
    option = option_of(iteration(), serving_pool())
    whole, half = (
        simulated(option, goal_of(input_tokens=8000, prefix_hit=hit)).ttft_s_R.mean()
        for hit in (0.0, 0.8)
    )
    assert half < 0.6 * whole


def test_kept_drafts_shorten_the_time_per_token() -> None:
    plain = iteration(
        "deepseek-v3",
        engine="sglang",
        degrees=InstanceDegrees(attention_data=8, expert=8),
        a2a_backend=A2aBackend.ALLGATHER,
    )
    times = [
        simulated(option_of(one, serving_pool()), goal_of("sglang")).tpot_s_R.mean()
        for one in (plain, replace(plain, drafting=Drafting(draft_tokens=2, acceptance=0.9)))
    ]
    assert times[1] < 0.7 * times[0]
