"""Tables of a simulation against the step that they stand for."""

from dataclasses import replace

import numpy as np
import pytest

from tests.rows import Failures
from tests.tuner.decoders import DEEPSEEK_V3, LLAMA_70B
from tuner.costs.serve.decoder import Formats
from tuner.costs.serve.engine import A2aBackend, InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.speculative import Drafting
from tuner.costs.serve.whole_step import prompt_step_s, step_s
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine
from tuner.simulate.serving.batching import Rules, simulate
from tuner.simulate.serving.load import uniform_requests
from tuner.simulate.serving.steps import MOST_TOKENS, StepTimes, step_times

FP8 = Formats(
    attention="fp8_block", output="fp8_block", ffn="fp8_block", experts="fp8_block", kv="fp8"
)
MACHINE = ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("h200-sxm"), tables=None)
DATA = Iteration(
    decoder=DEEPSEEK_V3,
    formats=FP8,
    degrees=InstanceDegrees(attention_data=16, expert=16),
    traits=ENGINE_TRAITS["sglang"],
    machine=MACHINE,
    a2a_backend=A2aBackend.LOW_LATENCY,
)
DENSE = Iteration(
    decoder=LLAMA_70B,
    formats=FP8,
    degrees=InstanceDegrees(),
    traits=ENGINE_TRAITS["vllm"],
    machine=MACHINE,
)
DRAFTING = Drafting(draft_tokens=3, acceptance=0.7)
KINDS = {
    "plain": DATA,
    "few graphs": replace(DATA, graph_sequences=64.0, stream_s=3e-3),
    "few graphs in stages": replace(
        DENSE, degrees=InstanceDegrees(pipeline=2), graph_sequences=32.0, stream_s=1e-3
    ),
    "drafting": replace(DATA, drafting=DRAFTING),
    "halves": replace(DATA, two_batch_overlap=True),
    "both": replace(DATA, two_batch_overlap=True, drafting=DRAFTING),
    "stages": replace(DENSE, degrees=InstanceDegrees(pipeline=4)),
    "drafting in stages": replace(DENSE, degrees=InstanceDegrees(pipeline=4), drafting=DRAFTING),
}


def tables(iteration: Iteration) -> StepTimes:
    return step_times(iteration, most_tokens=8192, most_sequences=256, longest=8192)


def test_a_step_of_the_tables_is_the_whole_step(failures: Failures) -> None:
    for kind, iteration in KINDS.items():
        found = tables(iteration)
        for sequences, past in ((1, 500.0), (16, 2000.0), (128, 2000.0), (256, 4000.0)):
            expected_s = step_s(iteration, np.array([float(sequences)]), np.array([past]))
            at_s = found.decode_step_s(sequences, past)
            with failures.of(kind, sequences):
                assert at_s == pytest.approx(float(expected_s[0]), rel=0.03)
        for tokens, before in ((512, 0.0), (4096, 0.0), (4096, 2048.0)):
            expected_s = prompt_step_s(iteration, np.array([float(tokens)]), np.array([before]))
            at_s = found.prompt_step_s(tokens, before)
            with failures.of(kind, tokens, before):
                # A drafter's GEMMs are those of a full step, whatever the step.
                assert at_s == pytest.approx(float(expected_s[0]), rel=0.05)


def test_a_step_larger_than_the_tables_takes_in_proportion() -> None:
    found = step_times(DENSE, most_tokens=2**31, most_sequences=2, longest=8192)
    assert found.most_tokens == MOST_TOKENS
    largest_s, twice_s = (found.prompt_step_s(n * MOST_TOKENS, 0.0) for n in (1, 2))
    assert twice_s > 1.9 * largest_s


def test_an_output_takes_the_steps_that_its_drafts_leave() -> None:
    found = tables(KINDS["drafting"])
    assert tables(DATA).steps_of(500) == 500
    assert found.steps_of(1) == 1
    expected = (500 + DRAFTING.overshoot_tokens) / DRAFTING.tokens_per_step
    assert found.steps_of(500) == round(expected)


def test_drafts_shorten_the_time_per_token_as_the_tokens_of_a_step_say() -> None:
    requests = uniform_requests(40, input_tokens=500, output_tokens=600, least_ratio=1.0, seed=0)
    rules = Rules(batching=ENGINE_TRAITS["sglang"].batching, step_tokens=16384)
    means = {}
    for kind in ("plain", "drafting"):
        served = simulate(requests, times=tables(KINDS[kind]), rules=rules, concurrency=4)
        means[kind] = float(served.tpot_s_R.mean())
    steps = [
        float(step_s(KINDS[kind], np.array([4.0]), np.array([800.0]))[0])
        for kind in ("plain", "drafting")
    ]
    expected = steps[1] / steps[0] / DRAFTING.tokens_per_step
    assert means["drafting"] / means["plain"] == pytest.approx(expected, rel=0.05)


def test_a_pipeline_serves_more_of_many_requests_than_one_device_of_its_speed() -> None:
    requests = uniform_requests(512, input_tokens=1000, output_tokens=100, least_ratio=1.0, seed=0)
    ends = {}
    for stages in (1, 4):
        times = tables(replace(DENSE, degrees=InstanceDegrees(pipeline=stages)))
        rules = Rules(batching=ENGINE_TRAITS["vllm"].batching, step_tokens=4096)
        served = simulate(requests, times=times, rules=rules, concurrency=256)
        ends[stages] = float(served.end_s_R.max())
    # Four devices, and micro-batches of a quarter each.
    assert 2.0 < ends[1] / ends[4] <= 4.05
