"""Widths in the table against the public config files that ship as examples."""

from dataclasses import replace
from pathlib import Path

from tests.rows import each_row
from tuner.backtest.serving.decoders import (
    DEEPSEEK_V3,
    DEEPSEEK_V32,
    GLM_5,
    GPT_OSS_20B,
    GPT_OSS_120B,
    KIMI_K2,
    LLAMA_8B,
    LLAMA_70B,
    LLAMA_405B,
    MINIMAX_M2,
    MIXTRAL_8X7B,
    MIXTRAL_8X22B,
    QWEN3_30B,
    QWEN3_235B,
    QWEN35_397B,
    checkpoint_formats,
    find_decoder,
)
from tuner.costs.serve.decoder import Decoder, decoder_of
from tuner.spec.huggingface.read import read_model

MODELS = Path(__file__).parents[4] / "examples" / "models"


@each_row(
    ("folder", "decoder"),
    [
        ("deepseek-v3", DEEPSEEK_V3),
        ("deepseek-v3.2", DEEPSEEK_V32),
        ("glm-5", GLM_5),
        ("kimi-k2", KIMI_K2),
        ("kimi-k2.5", KIMI_K2),
        ("llama-3.1-8b", LLAMA_8B),
        ("llama-3.1-70b", LLAMA_70B),
        ("llama-3.1-405b", LLAMA_405B),
        ("minimax-m2", MINIMAX_M2),
        ("mixtral-8x7b", MIXTRAL_8X7B),
        ("mixtral-8x22b", MIXTRAL_8X22B),
        ("qwen3-30b-a3b", QWEN3_30B),
        ("qwen3-235b-a22b", QWEN3_235B),
        ("qwen3.5-397b-a17b", QWEN35_397B),
    ],
)
def test_a_model_is_what_its_config_says(folder: str, decoder: Decoder) -> None:
    # Kimi-K2.5's language model is Kimi-K2.
    read = decoder_of(read_model(MODELS / folder))
    nameless = replace(read, name=decoder.name, architecture="", vision_elements=0)
    assert replace(nameless, positions=0, rope_factor=1.0) == decoder


@each_row(("folder", "decoder"), [("gpt-oss-120b", GPT_OSS_120B), ("gpt-oss-20b", GPT_OSS_20B)])
def test_sliding_window_and_full_attention_layers_differ(folder: str, decoder: Decoder) -> None:
    read = decoder_of(read_model(MODELS / folder))
    assert set(read.layers) == set(decoder.layers)
    assert {group.attention.window for group in read.layers} == {0, 128}
    assert read.experts == decoder.experts


@each_row(
    ("path", "decoder"),
    [
        ("deepseek-ai/DeepSeek-V3.2", DEEPSEEK_V32),
        ("nvidia/DeepSeek-R1-0528-FP4-V2", DEEPSEEK_V3),
        ("nvidia/Llama-3.1-8B-Instruct-FP8", LLAMA_8B),
        ("moonshotai/Kimi-K2.5", KIMI_K2),
        ("someone/else", None),
    ],
)
def test_a_path_names_the_longest_match(path: str, decoder: Decoder | None) -> None:
    assert find_decoder(path) is decoder


def test_checkpoints_keep_what_they_did_not_quantise() -> None:
    result = checkpoint_formats(KIMI_K2, precision="fp4", engine="vllm", is_blackwell=True)
    assert result is not None
    assert (result.attention, result.experts, result.kv) == ("bf16", "nvfp4", "fp8")
    assert checkpoint_formats(KIMI_K2, precision="fp3", engine="vllm", is_blackwell=True) is None
