"""Layers to stages as public recipes have them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.backtest.stages import divide_layers


def test_layers_that_divide_are_spread_evenly() -> None:
    assert divide_layers(32, num_stages=4) == ((8, 8, 8, 8), False)


def test_embedding_and_loss_count_where_that_makes_it_even() -> None:
    # Llama 3.1 405B: 126 layers and two ends on 16 stages.
    counts, ends = divide_layers(126, num_stages=16)
    assert counts == (7, *(8,) * 14, 7)
    assert ends


def test_deepseek_v3_fills_from_the_front() -> None:
    # Megatron-Bridge's layout of 61 layers on 16 stages: fifteen times 4, then 1, MTP and loss.
    counts, _ = divide_layers(61, mtp_layers=1, num_stages=16)
    assert counts == (*(4,) * 15, 1)


def test_more_stages_than_layers_and_ends_are_refused() -> None:
    with pytest.raises(ValueError, match="exceed 4 layers"):
        divide_layers(4, num_stages=7)


@given(layers=st.integers(1, 200), num_stages=st.integers(1, 64), mtp=st.integers(0, 1))
@settings(deadline=None, max_examples=200)
def test_every_layer_lies_somewhere(layers: int, num_stages: int, mtp: int) -> None:
    if num_stages > layers + 2:
        return
    counts, _ = divide_layers(layers, mtp_layers=mtp, num_stages=num_stages)
    assert len(counts) == num_stages
    assert sum(counts) == layers
    assert min(counts) >= 0
