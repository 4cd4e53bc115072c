"""Activation bytes: what the meter counts, and how they fall with recomputation and chunks."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from profilers.steps.memory import ActivationMeter, storage_bytes
from tests.rows import each_row

Fields = dict[str, Any]
Observed = dict[str, dict[str, Any]]

CHUNKS = (1, 2, 8)
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
COPIES = 4 * TOKENS
# fp32 bytes that one layer keeps of its tokens, in order: both norms' inputs, scales and outputs;
# rotated queries and keys, values, mixed values, log-sum-exp; router probabilities, the balancing
# gradient of 2 sequences, expert ids, their probabilities and sum, the weights.
ATTENTION_BYTES = TOKENS * (2 * (2 * 32 * 4 + 4) + (4 + 2 + 2 + 4) * 8 * 4 + 4 * 4)
ROUTER_BYTES = TOKENS * (8 * 4 + 4 * 8 + 4 * 4 + 4 + 4 * 4) + 2 * 8 * 4
LAYER_BYTES = ATTENTION_BYTES + ROUTER_BYTES
INPUT_BYTES = TOKENS * 32 * 4
COPY_BYTES = (32 + 3 * 64 + 32) * 4 + 8
"""Of one copy: sorted row, gate and up, their product, result; its index."""
# Inputs of the whole step's 4 micro-batches; norm's input, scale and output; log-probabilities,
# the step's targets and the loss's weight.
TEXT_BYTES = 4 * TOKENS * 8
HEAD_BYTES = TOKENS * (2 * 32 * 4 + 4 + 16 * 4) + TEXT_BYTES + 4


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
    return observe_cases(tmp_path_factory.mktemp("memory"), {1: cases}, metered=cases)


def _held_bytes(observed: Mapping[str, Mapping[str, Any]], name: str) -> int:
    return int(observed[name]["activation_bytes"][0])


@pytest.mark.slow
@each_row("recompute", ["selective", "full"])
def test_activation_bytes_fall_as_a_constant_plus_a_part_per_chunk(
    observed: Observed, recompute: str
) -> None:
    held = np.array([_held_bytes(observed, f"{recompute} {chunks}") for chunks in CHUNKS])
    per_chunk, constant = np.polyfit(1 / np.array(CHUNKS), held, 1)
    assert np.abs((constant + per_chunk / np.array(CHUNKS)) / held - 1).max() <= 0.03
    # What one layer's experts keep is what the chunks divide.
    assert per_chunk == pytest.approx(COPIES * COPY_BYTES, rel=0.03)


@each_row("chunks", CHUNKS)
def test_the_bytes_follow_from_the_shapes_to_the_last_one(observed: Observed, chunks: int) -> None:
    chunk_bytes = COPIES * COPY_BYTES // chunks
    whole = TEXT_BYTES + 2 * (LAYER_BYTES + COPIES * COPY_BYTES) + HEAD_BYTES
    assert _held_bytes(observed, "none") == whole
    selective = TEXT_BYTES + 2 * LAYER_BYTES + max(HEAD_BYTES, chunk_bytes)
    assert _held_bytes(observed, f"selective {chunks}") == selective
    full = TEXT_BYTES + INPUT_BYTES + LAYER_BYTES + chunk_bytes
    assert _held_bytes(observed, f"full {chunks}") == full


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


def test_bytes_are_released_with_the_graph_and_gradients_read_while_the_backward_runs() -> None:
    x = torch.ones(100, requires_grad=True)
    meter = _meter()
    for _ in range(3):
        with meter.recording():
            y = x.exp().sum()
        torch.autograd.backward(y)
    assert meter.peak_bytes == 400
    x = torch.ones(100, requires_grad=True)
    meter = ActivationMeter(
        parameters=tuple, gradient_bytes=lambda: 0 if x.grad is None else storage_bytes([x.grad])
    )
    for _ in range(2):
        with meter.recording():
            y = x.exp().sum()
        torch.autograd.backward(y)
    assert meter.peak_gradient_bytes == 400
