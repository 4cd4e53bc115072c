"""What clients see, and the rules that engines go by."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tuner.decoders import LLAMA_8B
from tuner.catalog.serve_rules.traits import Batching
from tuner.costs.serve.decoder import Formats
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import HostTimes, ServingMachine
from tuner.simulate.serving.client import (
    ClientOverhead,
    client_observed_ttft_s,
    engine_client,
    engine_rules,
    prefill_step_seconds,
)
from tuner.simulate.serving.load import Served
from tuner.simulate.serving.steps import StepTimes

ITERATION = Iteration(
    decoder=LLAMA_8B,
    formats=Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16"),
    degrees=InstanceDegrees(),
    traits=ENGINE_TRAITS["vllm"],
    machine=ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("h200-sxm"), tables=None),
)


def times(*, token_s: float) -> StepTimes:
    """1 ms of head, 10 ms between steps with prompts, 1 us of attention a token."""
    return StepTimes(
        linear_s=[token_s * tokens for tokens in range(9000)],
        head_s=[1e-3, 1e-3, 1e-3],
        decode_s=[[0.0, 0.0]] * 3,
        past_step=1.0,
        prompt_s=[0.0, 1e-2, 2e-2],
        prompt_step=1e4,
        scheduler_s=5e-3,
        prompt_scheduler_s=1e-2,
    )


def test_a_first_token_waits_for_steps_and_for_its_client() -> None:
    # Two requests of 11 tokens: 1 s and 2 s after the first; on average 0.15 s a token.
    served = Served(
        arrival_s_R=np.array([0.0, 0.0]),
        first_token_s_R=np.array([0.5, 0.7]),
        end_s_R=np.array([1.5, 2.7]),
        output_R=np.array([11, 11]),
    )
    found = client_observed_ttft_s(served, client=ClientOverhead(overhead_s=0.1, stream_steps=2.0))
    assert found == pytest.approx([0.5 + 3.5 * 0.15 + 0.1, 0.7 + 3.5 * 0.15 + 0.1])


def test_outputs_of_one_token_wait_for_their_client_only() -> None:
    one = np.array([1.0])
    served = Served(arrival_s_R=0.0 * one, first_token_s_R=one, end_s_R=one, output_R=np.array([1]))
    for engine, late_s in (("vllm", 0.015), ("sglang", 0.01)):
        client = engine_client(replace(ITERATION, traits=ENGINE_TRAITS[engine]))
        assert client_observed_ttft_s(served, client=client) == pytest.approx([1.0 + late_s])


def test_a_measured_host_stands_for_the_published_client() -> None:
    host = HostTimes(step_s=5e-3, tensor_step_s=1e-3, sequence_s=1e-4, request_s=3e-3)
    client = engine_client(replace(ITERATION, machine=replace(ITERATION.machine, host=host)))
    assert client.late_s(20e-3) == pytest.approx(3e-3)


def test_an_engine_batches_as_it_does_unless_configured() -> None:
    expected: dict[tuple[str, bool | None], tuple[Batching, bool]] = {
        ("vllm", None): (Batching.CHUNKED, False),
        ("vllm", False): (Batching.WHOLE, False),
        ("sglang", None): (Batching.PREFILL_FIRST, True),
        ("sglang", True): (Batching.PREFILL_FIRST, True),
        ("trtllm", None): (Batching.WHOLE, True),
        ("trtllm", True): (Batching.CHUNKED, True),
    }
    found = {}
    for engine, is_chunked in expected:
        rules = engine_rules(
            ENGINE_TRAITS[engine], step_tokens=4096, kv_tokens=1e6, is_chunked=is_chunked
        )
        found[engine, is_chunked] = (rules.batching, rules.reserves_output)
    assert found == expected


def test_a_long_prompt_is_read_in_steps_of_the_budget() -> None:
    full, alone = times(token_s=2e-6), times(token_s=1e-6)
    prompt_s = prefill_step_seconds(full, alone, ranks=3, step_tokens=4000)
    # 8000 tokens in two steps: 2 x 10 ms between, 1 ms of head each, 8 ms of attention; GEMMs
    # of 8, 12 or 16 ms as one, two or all of three ranks read.
    for busy, grouped_gemms_s in ((1, 8e-3), (2, 12e-3), (3, 16e-3)):
        assert prompt_s(8000, busy) == pytest.approx(2e-2 + 2e-3 + 8e-3 + grouped_gemms_s, rel=1e-6)


def test_of_a_cached_prompt_the_rest_is_computed() -> None:
    whole = times(token_s=1e-6)
    prompt_s = prefill_step_seconds(whole, whole, ranks=1, step_tokens=8000, computed_ratio=0.25)
    # 2000 of 8000 tokens: 2 ms of GEMMs, 2 ms of attention from 6000 on.
    assert prompt_s(8000, 1) == pytest.approx(1e-2 + 1e-3 + 2e-3 + 2e-3, rel=1e-6)
