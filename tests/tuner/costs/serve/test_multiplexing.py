"""Shares of a device, against published curves and closed forms."""

import numpy as np
import pytest

from tests.rows import each_row
from tuner.costs.serve.decoder import AttentionKind, Decoder, DecoderAttention, Formats, Layers
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.multiplexing import DeviceShare, drawn_ratio, on_share, steady_rate_per_s
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine

LLAMA = Decoder(
    name="llama3-8b",
    hidden=4096,
    vocab=128_256,
    layers=(
        Layers(
            count=32,
            attention=DecoderAttention(
                kind=AttentionKind.GROUPED, heads=32, kv_heads=8, head_dim=128
            ),
            dense_ffn=14_336,
        ),
    ),
)


@pytest.fixture(scope="module")
def whole() -> Iteration:
    """Llama3-8B on an A100, as semi-PD measured it."""
    formats = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")
    return Iteration(
        decoder=LLAMA,
        formats=formats,
        degrees=InstanceDegrees(),
        traits=ENGINE_TRAITS["sglang"],
        machine=ServingMachine(engines=ENGINE_TRAITS, sheet=find_device("a100-sxm"), tables=None),
    )


def step_s(iteration: Iteration, running: float) -> float:
    n_Q, past_Q = np.array([running]), np.array([600.0])
    parts = iteration.linear_s(n_Q) + iteration.head_s(n_Q) + iteration.decode_s(n_Q, past_Q)
    return float(parts[0]) + iteration.scheduler_s


def stretch(whole: Iteration, running: float, share: DeviceShare) -> float:
    return step_s(on_share(whole, share), running) / step_s(whole, running)


@each_row("ratio", (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8))
def test_semi_pds_measured_curve_lies_between_few_and_many_sequences(
    whole: Iteration, ratio: float
) -> None:
    # arXiv:2504.19867, Llama3-8B on ShareGPT: TPOT(y) / TPOT(1) = 0.6284 / y + 0.3818.
    measured = 0.6284 / ratio + 0.3818
    share = DeviceShare(compute_ratio=ratio)
    assert stretch(whole, 1.0, share) <= measured <= 1.06 * stretch(whole, 512.0, share)


def test_prompts_slow_in_proportion_to_their_share(whole: Iteration) -> None:
    # semi-PD: l_x = l_100 / x.
    half = on_share(whole, DeviceShare(compute_ratio=0.5))
    tokens_Q = np.array([8192.0])
    assert float(half.prompt_s(tokens_Q)[0] / whole.prompt_s(tokens_Q)[0]) == pytest.approx(2.0)
    assert float(half.linear_s(tokens_Q)[0] / whole.linear_s(tokens_Q)[0]) == pytest.approx(
        2.0, rel=0.1
    )


def test_what_memory_binds_is_not_slowed_until_few_multiprocessors_are_left(
    whole: Iteration,
) -> None:
    # An A100-80GB saturates its 2.04 TB/s with 0.28 of its multiprocessors.
    assert stretch(whole, 1.0, DeviceShare(compute_ratio=0.3)) == pytest.approx(1.0, rel=0.1)
    assert stretch(whole, 1.0, DeviceShare(compute_ratio=0.14)) == pytest.approx(2.0, rel=0.1)


def test_taken_bandwidth_slows_decode_in_proportion(whole: Iteration) -> None:
    share = DeviceShare(compute_ratio=0.9, bandwidth_ratio=0.5)
    assert stretch(whole, 1.0, share) == pytest.approx(2.0, rel=0.1)


def test_a_prompt_draws_its_weights_and_activations(whole: Iteration) -> None:
    # Once: 2.2e8 weights a layer at 2 bytes, 32 layers, and no more than as much in activations.
    weights = 32 * 2.0 * (4096 * (4096 * 2 + 2 * 1024) + 3 * 4096 * 14_336)
    ratio = drawn_ratio(whole, tokens=512.0, seconds=0.1)
    least = weights / (0.1 * whole.machine.sheet.memory_bytes_per_s)
    assert least < ratio < 2.0 * least
    assert drawn_ratio(whole, tokens=512.0, seconds=0.2) == pytest.approx(0.5 * ratio)


def test_the_steady_state_obeys_littles_law() -> None:
    running_N = np.array([1.0, 8.0, 64.0])
    alone_N, beside_N = 0.01 + 1e-4 * running_N, 0.02 + 1e-4 * running_N
    rate_N, tpot_N = steady_rate_per_s(
        running_N,
        isolated_s_N=alone_N,
        multiplexed_s_N=beside_N,
        prompt_s=0.05,
        output_tokens=200.0,
    )
    assert (rate_N * 200.0 * tpot_N).tolist() == pytest.approx(running_N.tolist())
    assert (tpot_N > alone_N).all()
    assert (tpot_N < beside_N).all()


def test_prefill_serves_no_more_than_its_share_can() -> None:
    running_N = np.array([1000.0])
    rate_N, tpot_N = steady_rate_per_s(
        running_N,
        isolated_s_N=np.array([0.01]),
        multiplexed_s_N=np.array([0.02]),
        prompt_s=0.1,
        output_tokens=100.0,
    )
    assert rate_N[0] == pytest.approx(10.0)
    assert tpot_N[0] == pytest.approx(0.02)


@each_row("ratio", [0.0, 1.5])
def test_a_share_is_a_share(ratio: float) -> None:
    with pytest.raises(ValueError, match="must be shares above 0, at most 1"):
        DeviceShare(compute_ratio=ratio)
