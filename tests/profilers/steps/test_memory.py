"""Activation bytes: what the meter counts, and how they fall with recomputation and chunks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from profilers.steps.memory import ActivationMeter, storage_bytes

Fields = dict[str, Any]
Observed = dict[str, dict[str, Any]]

CHUNKS = (1, 2, 4, 8)
# Wide experts and few words, so that the experts and not the head are the peak even in 8 chunks.
WIDE = {
    "model": {
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "vocab_size": 16,
        "layers": ["moe", "moe"],
        "num_experts": 8,
        "top_k": 4,
        "moe_ffn_size": 64,
    },
    "sequence_length": 64,
    "steps": 1,
}
TOKENS = 2 * 64
COPY_BYTES = (32 + 3 * 64 + 32) * 4 + 2 * 8 + 4
"""Of one copy in fp32: sorted row, gate and up, product, result; two indices and the weight."""


@pytest.fixture(scope="module")
def observed(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_config: Callable[..., Fields],
    observe_cases: Callable[..., Observed],
) -> Observed:
    cases = {"none": tiny_config(**WIDE) | {"stages": [{"num_layers": 2}]}}
    for recompute in ("selective", "full"):
        for chunks in CHUNKS:
            stage = {"num_layers": 2, "recompute": recompute, "chunks": chunks}
            cases[f"{recompute} {chunks}"] = tiny_config(**WIDE) | {"stages": [stage]}
    return observe_cases(tmp_path_factory.mktemp("memory"), cases, ranks=1)


def _held_bytes(observed: Mapping[str, Mapping[str, Any]], name: str) -> int:
    return int(observed[name]["activation_bytes"][0])


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_activation_bytes_fall_as_a_constant_plus_a_part_per_chunk(
    observed: Observed, recompute: str
) -> None:
    held = np.array([_held_bytes(observed, f"{recompute} {chunks}") for chunks in CHUNKS])
    per_chunk, constant = np.polyfit(1 / np.array(CHUNKS), held, 1)
    fitted = constant + per_chunk / np.array(CHUNKS)
    assert np.abs(fitted / held - 1).max() <= 0.03
    # 4 copies of each token: what one layer's experts keep is what the chunks divide.
    assert per_chunk == pytest.approx(TOKENS * 4 * COPY_BYTES, rel=0.03)


def test_each_recomputation_holds_less_than_the_one_before(observed: Observed) -> None:
    levels = ("none", "selective 1", "full 1", "full 8")
    held = [_held_bytes(observed, name) for name in levels]
    assert held == sorted(held, reverse=True)
    assert len(set(held)) == len(levels)


def _meter(parameters: Iterable[torch.Tensor] = ()) -> ActivationMeter:
    return ActivationMeter(parameters=lambda: parameters, gradient_bytes=lambda: 0)


def test_a_storage_counts_once_and_whole_and_weights_do_not() -> None:
    weight = torch.ones(1000, requires_grad=True)
    x = torch.ones(100, requires_grad=True)
    meter = _meter([weight])
    with meter.recording():
        y = x[:10] * x[10:20] + (weight[:10] * 2.0) * weight[10:20]
    # x is kept as two slices of one storage of 400 bytes; weight[:10] * 2 is 40 bytes of its own.
    assert meter.peak_bytes == 400 + 40
    torch.autograd.backward(y.sum())


def test_bytes_are_released_when_the_graph_is() -> None:
    x = torch.ones(100, requires_grad=True)
    meter = _meter()
    for _ in range(3):
        with meter.recording():
            y = x.exp().sum()
        torch.autograd.backward(y)
    assert meter.peak_bytes == 400


def test_gradients_are_asked_for_while_the_backward_runs() -> None:
    x = torch.ones(100, requires_grad=True)
    meter = ActivationMeter(
        parameters=tuple, gradient_bytes=lambda: 0 if x.grad is None else storage_bytes([x.grad])
    )
    for _ in range(2):
        with meter.recording():
            y = x.exp().sum()
        torch.autograd.backward(y)
    assert meter.peak_gradient_bytes == 400
