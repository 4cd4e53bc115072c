"""Weights and caches, by hand."""

import pytest

from tuner.backtest.serving.decoders import DEEPSEEK_V3, LLAMA_70B
from tuner.costs.serve.decoder import Formats
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.memory import kv_bytes_per_token, weight_bytes

FP8 = Formats(
    attention="fp8_block", output="fp8_block", ffn="fp8_block", experts="fp8_block", kv="fp8"
)
BF16 = Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16")


def test_deepseek_weighs_what_its_parameters_do() -> None:
    # 671 billion parameters, of which embedding and head stay at two bytes.
    assert weight_bytes(DEEPSEEK_V3, FP8, InstanceDegrees()) == pytest.approx(673e9, rel=0.01)


def test_llama_weighs_what_its_parameters_do() -> None:
    assert weight_bytes(LLAMA_70B, BF16, InstanceDegrees()) == pytest.approx(2 * 70.55e9, rel=0.01)


def test_compressed_keys_are_whole_on_every_rank() -> None:
    # 61 layers of 512 + 64 elements at one byte, whatever the degree.
    for tensor in (1, 8):
        degrees = InstanceDegrees(attention_tensor=tensor, expert=tensor)
        assert kv_bytes_per_token(DEEPSEEK_V3, FP8, degrees) == 61 * 576


def test_heads_are_split_until_there_is_one_each() -> None:
    # 80 layers, keys and values of 8 heads of 128 at two bytes: 327,680 bytes on one device.
    each = {
        tensor: kv_bytes_per_token(LLAMA_70B, BF16, InstanceDegrees(attention_tensor=tensor))
        for tensor in (1, 8, 16)
    }
    assert each == {1: 327_680, 8: 40_960, 16: 40_960}
