"""Tokens beside prompts, by hand and against the requests that are simulated."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.search.serve.testing import demand, iteration
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.speculative import Drafting
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.search.serve.mixed_batches import lasting_running, prompt_time, token_seconds
from tuner.simulate.serving.batching import simulate
from tuner.simulate.serving.client import engine_rules
from tuner.simulate.serving.load import Requests
from tuner.simulate.serving.lockstep import simulate_together
from tuner.simulate.serving.steps import step_times


def counts(*numbers: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.array(numbers, dtype=np.float64)


@each_row("engine", ["vllm", "sglang", "trtllm"])
@each_row(("inputs", "outputs"), [(2000, 400), (200, 600), (6000, 200), (30000, 2), (60000, 1)])
def test_the_steady_state_is_that_of_a_full_closed_loop(
    engine: str, inputs: int, outputs: int
) -> None:
    own, running, budget = iteration(engine=engine), 24, 8192
    asked = demand(input_tokens=inputs, output_tokens=outputs)
    each_s = float(token_seconds(own, counts(running), asked, step_tokens=budget)[0])
    count = 30 * running
    # Answers of unlike lengths come apart; equal ones would stay in step.
    rng = np.random.default_rng(7)
    served = simulate(
        Requests(
            input_R=np.full(count, inputs),
            output_R=rng.integers(max(outputs // 2, 1), outputs + (outputs + 1) // 2, count),
        ),
        times=step_times(
            own, most_tokens=budget + running, most_sequences=running, longest=inputs + 2 * outputs
        ),
        rules=engine_rules(own.traits, step_tokens=budget, kv_tokens=1e9, most_running=running),
        concurrency=running,
    )
    middle = slice(count // 4, 3 * count // 4)
    rate = 0.5 * count / float(served.end_s_R[middle].max() - served.arrival_s_R[middle].min())
    lasting = min(running, lasting_running(own, asked, step_tokens=budget))
    assert lasting / (outputs * each_s) == pytest.approx(rate, rel=0.15)


@each_row("engine", ["vllm", "sglang"])
def test_waits_of_ranks_are_those_of_ranks_that_are_simulated_together(engine: str) -> None:
    budget = 8192
    for ranks, running, inputs, outputs in (
        (2, 24, 2000, 400),
        (8, 8, 6000, 200),
        (8, 24, 1000, 200),
    ):
        degrees = InstanceDegrees(attention_data=ranks, expert=ranks)
        own = iteration("deepseek-v2-lite", engine=engine, degrees=degrees)
        asked = demand(input_tokens=inputs, output_tokens=outputs)
        each_s = float(token_seconds(own, counts(running), asked, step_tokens=budget)[0])
        rng = np.random.default_rng(7)
        served = simulate_together(
            Requests(
                input_R=np.full(20 * running, inputs),
                output_R=rng.integers(outputs // 2, outputs + outputs // 2, 20 * running),
            ),
            times=step_times(
                own,
                most_tokens=budget + running,
                most_sequences=running,
                longest=inputs + 2 * outputs,
            ),
            rules=engine_rules(
                ENGINE_TRAITS[engine], step_tokens=budget, kv_tokens=1e9, most_running=running
            ),
            ranks=ranks,
            concurrency=running,
        )
        middle = slice(5 * running, 15 * running)
        span_s = served.end_s_R[middle].max() - served.arrival_s_R[middle].min()
        assert running / (outputs * each_s) == pytest.approx(10 * running / span_s, rel=0.2)
    # One rank, or ranks whose engine aligns their prompts, wait for none.
    assert not iteration("deepseek-v2-lite", engine="trtllm", degrees=degrees).waits_for_ranks


def test_more_than_the_budget_has_steps_for_take_as_long_as_those_that_run() -> None:
    # Of 1024 tokens a step, n running and n I / O = 20 n of prompts: 1024 / 21 = 48.8.
    asked, own = demand(input_tokens=8000, output_tokens=400), iteration()
    most = lasting_running(own, asked, step_tokens=1024)
    found = token_seconds(own, counts(48, most, 49, 500), asked, step_tokens=1024)
    assert most == pytest.approx(1024 / 21)
    assert found[0] < found[1] == found[2] == found[3]


def test_prompts_in_steps_of_their_own_leave_any_number_running() -> None:
    asked = demand(input_tokens=8000, output_tokens=1)
    assert math.isinf(lasting_running(iteration(engine="sglang"), asked, step_tokens=1024))


def test_a_prompt_takes_more_steps_of_a_smaller_budget() -> None:
    one, own = iteration(), demand(input_tokens=8000)
    few, many = (prompt_time(one, own, step_tokens=tokens) for tokens in (8192, 512))
    assert many.latency_s > few.latency_s
    assert few.busy_s == few.latency_s


def test_a_cached_prefix_is_looked_at_and_not_computed() -> None:
    own = iteration()
    whole, half, short = (
        prompt_time(own, demand(input_tokens=tokens, prefix_hit=hit), step_tokens=8192).latency_s
        for tokens, hit in ((8000, 0.0), (8000, 0.5), (4000, 0.0))
    )
    assert short < half < 0.75 * whole


def test_the_next_prompt_of_a_pipeline_begins_before_the_last_has_ended() -> None:
    piped = replace(iteration(), degrees=InstanceDegrees(attention_tensor=2, expert=2, pipeline=4))
    found = prompt_time(piped, demand(), step_tokens=8192)
    assert found.busy_s == pytest.approx(0.25 * found.latency_s, rel=0.1)


def test_drafts_that_are_kept_shorten_tokens_and_refused_ones_lengthen_them() -> None:
    plain, asked, few = iteration("deepseek-v3"), demand(), counts(4)
    plain = replace(plain, degrees=InstanceDegrees(attention_data=8, expert=8))
    without = float(token_seconds(plain, few, asked, step_tokens=8192)[0])
    kept, refused = (
        replace(plain, drafting=Drafting(draft_tokens=2, acceptance=share)) for share in (0.9, 0.0)
    )
    assert float(token_seconds(kept, few, asked, step_tokens=8192)[0]) < 0.7 * without
    assert float(token_seconds(refused, few, asked, step_tokens=8192)[0]) > without
