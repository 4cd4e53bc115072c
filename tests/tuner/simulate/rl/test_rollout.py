"""Rollouts against closed forms of the longest response."""

import math
from dataclasses import replace
from statistics import NormalDist

import numpy as np
import pytest

from tests.tuner.decoders import LLAMA_8B
from tuner.costs.serve.decoder import Formats
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine
from tuner.simulate.rl.rollout import Batch, RolloutSide, draw_batch, roll_out
from tuner.spec.serving.lengths import LengthKind, LengthLaw, law_with_mean, mean_tokens

FIXED = LengthLaw(kind=LengthKind.FIXED, mean=100)


@pytest.fixture(scope="module")
def side() -> RolloutSide:
    sheet = find_device("h100-sxm")
    return RolloutSide(
        iteration=Iteration(
            decoder=LLAMA_8B,
            formats=Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16"),
            degrees=InstanceDegrees(),
            traits=ENGINE_TRAITS["vllm"],
            machine=ServingMachine(sheet=sheet, tables=None, engines=ENGINE_TRAITS),
        ),
        instances=8,
        step_tokens=8192,
        most_running=256,
        memory_ratio=0.8,
        memory_bytes=float(sheet.memory_bytes),
    )


def batch_of(response_tokens: LengthLaw, *, prompts: int = 64, samples: int = 8) -> Batch:
    return draw_batch(
        prompts=prompts, samples=samples, prompt_tokens=FIXED, response_tokens=response_tokens
    )


def with_gap(batch: Batch, side: RolloutSide, gap_s: float) -> float:
    return roll_out(batch, side, versions=0.0, gap_s=gap_s).last_s


@pytest.mark.parametrize("law", ["exponential", "lognormal"])
def test_the_tail_has_its_closed_form(side: RolloutSide, law: str) -> None:
    count, mean, gap_s = 4096, 500.0, 10.0
    if law == "exponential":
        # E[max] of N exponentials is their mean times the harmonic number H_N.
        quantile_N = (np.arange(count) + 0.5) / count
        values = tuple(np.maximum(np.rint(-mean * np.log1p(-quantile_N)), 1).astype(int).tolist())
        lengths = LengthLaw(kind=LengthKind.EMPIRICAL, values=values)
        longest = mean * sum(1.0 / place for place in range(1, count + 1))
    else:
        # The largest of N normals lies near the quantile 1 - exp(-gamma) / N (Gumbel).
        lengths = LengthLaw(kind=LengthKind.LOGNORMAL, mean=mean, cv=1.0)
        variance = math.log(2.0)
        upper = NormalDist().inv_cdf(1.0 - math.exp(-0.5772) / count)
        longest = math.exp(math.log(mean) - variance / 2.0 + math.sqrt(variance) * upper)
    batch = batch_of(lengths, prompts=count // 8)
    wide = replace(side, most_running=4096, memory_bytes=1e14, instances=16)
    found = with_gap(batch, wide, gap_s) / gap_s
    assert found == pytest.approx(longest, rel=0.03)


def test_equal_responses_end_together(side: RolloutSide) -> None:
    rollout = roll_out(batch_of(FIXED), side, versions=0.0)
    assert rollout.most_s == pytest.approx(rollout.last_s, rel=0.2)


def test_a_closed_loop_is_not_slower_than_a_burst(side: RolloutSide) -> None:
    batch = batch_of(law_with_mean(300, cv=1.0, most=4000))
    burst = roll_out(batch, side, versions=0.0).last_s
    late = [roll_out(batch, side, versions=versions).last_s for versions in (1.0, 3.0)]
    assert late[1] < late[0] < burst


def test_more_engines_never_hurt(side: RolloutSide) -> None:
    batch = batch_of(law_with_mean(300, cv=1.0, most=4000))
    seconds = [
        roll_out(batch, replace(side, instances=count), versions=0.0).last_s for count in (2, 4, 8)
    ]
    assert seconds == sorted(seconds, reverse=True)


def test_a_law_has_the_mean_that_is_asked_for_after_truncation() -> None:
    for mean in (100, 3000, 3800):
        law = law_with_mean(mean, cv=0.8, most=3896)
        assert mean_tokens(law) == pytest.approx(mean, rel=1e-3)
    assert mean_tokens(law_with_mean(5000, cv=0.8, most=3896)) == 3896
