"""A step of AFD (attention-FFN disaggregation), on the datasheet of H100."""

from pathlib import Path

import numpy as np
import pytest

from tuner.costs.serve.afd_step import (
    AttentionSeconds,
    attention_cache_tokens,
    attention_seconds,
    expert_seconds,
    least_expert_devices,
    step_seconds,
    uniform_activated,
)
from tuner.costs.serve.decoder import Formats, decoder_of
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.machine import LAUNCH_S, MOST_EXPERT_KERNELS, ServingMachine
from tuner.costs.serve.memory import expert_bytes, kv_tokens
from tuner.devices.catalogue import find_device
from tuner.spec.huggingface.read import read_model

MODELS = Path(__file__).parents[4] / "examples" / "models"
BF16 = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")
DECODER = decoder_of(read_model(MODELS / "deepseek-v2"))
SHEET = find_device("h100-sxm")
MACHINE = ServingMachine(sheet=SHEET, tables=None)
ONE = Iteration(
    decoder=DECODER,
    formats=BF16,
    degrees=InstanceDegrees(),
    engine="sglang",
    machine=MACHINE,
)


def experts_s(tokens: float, devices: int) -> float:
    found = expert_seconds(
        DECODER,
        BF16,
        np.array([tokens]),
        devices=devices,
        machine=MACHINE,
        engine="sglang",
    )
    return float(found[0])


def test_deepseek_v2_takes_six_devices_of_80_gb_for_its_experts() -> None:
    # Janus' sizes: 27 of 160 experts fit, so six devices at least.
    assert expert_bytes(DECODER, BF16) == 3 * 5120 * 1536 * 2
    assert least_expert_devices(DECODER, BF16, memory_bytes=float(SHEET.memory_bytes)) == 6


def test_a_device_that_holds_not_one_expert_of_each_layer_cannot_serve_any() -> None:
    assert least_expert_devices(DECODER, BF16, memory_bytes=6e9) is None


def test_an_attention_device_keeps_the_room_of_the_experts_for_caches() -> None:
    room = float(SHEET.memory_bytes)
    apart = attention_cache_tokens(ONE, memory_bytes=room)
    together = kv_tokens(DECODER, BF16, InstanceDegrees(), memory_bytes=room)
    assert together < 0.0 < apart


def test_few_tokens_are_bound_by_the_experts_that_the_most_loaded_device_reads() -> None:
    read = uniform_activated(ONE.decoder.experts, np.array([16.0]), 8)[0]  # type: ignore[arg-type]
    assert read == pytest.approx(12.1, rel=0.05)
    streamed = 59 * read * expert_bytes(DECODER, BF16) / (0.8 * SHEET.memory_bytes_per_s)
    starts = 59 * (MOST_EXPERT_KERNELS + 1) * LAUNCH_S
    assert experts_s(16.0, 8) == pytest.approx(streamed + starts, rel=0.1)
    assert experts_s(16.0, 8) > streamed


def test_more_expert_devices_and_fewer_tokens_never_take_longer() -> None:
    by_devices = [experts_s(64.0, devices) for devices in (6, 8, 16, 32)]
    assert by_devices == sorted(by_devices, reverse=True)
    by_tokens = [experts_s(tokens, 8) for tokens in (1.0, 16.0, 256.0, 4096.0, 65536.0)]
    assert by_tokens == sorted(by_tokens)


def test_shared_experts_hide_behind_the_exchange_or_the_exchange_behind_them() -> None:
    attention = AttentionSeconds(plain_Q=np.array([1.0, 1.0]), shared_Q=np.array([0.5, 0.5]))
    step_Q = step_seconds(attention, np.array([2.0, 2.0]), np.array([0.1, 0.2]), layers=4)
    assert step_Q.tolist() == pytest.approx([3.5, 3.8])


def test_attention_takes_what_an_engine_takes_beside_its_experts() -> None:
    b_Q = np.array([1.0, 64.0])
    found = attention_seconds(ONE, b_Q, past_tokens=1000.0)
    parts = ONE.linear_parts(b_Q)
    others_Q = parts["experts"] + parts["router"] + parts["exchange"]
    whole_Q = np.sum(list(parts.values()), axis=0) + ONE.decode_s(b_Q, np.full(2, 1000.0))
    whole_Q = whole_Q + ONE.head_s(b_Q) + ONE.scheduler_s
    np.testing.assert_allclose(found.plain_Q + found.shared_Q, whole_Q - others_Q)
