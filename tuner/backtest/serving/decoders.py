"""The models that published serving runs name, from the configs of `examples/models`.

DeepSeek-R1, V3 and V3.1 are one model, and so are Llama-3.1-70B and 3.3-70B, Kimi-K2 and the
language model of K2.5. The storage formats are those of the quantised checkpoints (their
`quantization_config` or `hf_quant_config.json`), by the precision that a row states.
"""

from functools import cache
from typing import Final

from tuner.backtest.known_models import SHIPPED
from tuner.costs.serve.decoder import Decoder, Formats, decoder_of
from tuner.spec.huggingface.read import read_model

FOLDERS: Final = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3": "deepseek-v3",
    "deepseek-v3.2": "deepseek-v3.2",
    "kimi-k2": "kimi-k2",
    "glm-5": "glm-5",
    "minimax-m2": "minimax-m2",
    "qwen3.5-397b": "qwen3.5-397b-a17b",
    "qwen3-235b": "qwen3-235b-a22b",
    "qwen3-32b": "qwen3-32b",
    "qwen3-8b": "qwen3-8b",
    "qwen3-30b": "qwen3-30b-a3b",
    "qwen3-coder-480b": "qwen3-coder-480b-a35b",
    "mixtral-8x7b": "mixtral-8x7b",
    "mixtral-8x22b": "mixtral-8x22b",
    "gpt-oss-120b": "gpt-oss-120b",
    "gpt-oss-20b": "gpt-oss-20b",
    "llama-3.1-8b": "llama-3.1-8b",
    "llama-3.1-70b": "llama-3.1-70b",
    "llama-3.1-405b": "llama-3.1-405b",
    "llama-3.3-70b": "llama-3.1-70b",
}
"""Folders of configs, by what the path of a checkpoint contains."""


def find_decoder(path: str) -> Decoder | None:
    """Return the model that a path names; None where it is not known, or its config not there."""
    name = path.rsplit("/", 1)[-1].lower()
    words = [word for word in FOLDERS if word in name]
    return shipped_decoder(FOLDERS[max(words, key=len)]) if words else None


@cache
def shipped_decoder(folder: str) -> Decoder | None:
    """Return the model of a folder of `examples/models`; None where that is not installed."""
    path = SHIPPED / folder
    return decoder_of(read_model(path)) if path.is_dir() else None


def checkpoint_formats(
    decoder: Decoder, *, precision: str, engine: str, is_blackwell: bool
) -> Formats | None:
    """Formats of a checkpoint; None where the precision is not known.

    TensorRT-LLM caches keys and values in fp8, and so do fp8 and fp4 checkpoints of Llama, every
    NVFP4 checkpoint (`kv_cache_quant_algo`), and recipes of models with experts for Blackwell. A
    blank precision is bf16.
    """
    is_moe = decoder.experts is not None
    is_block = is_moe or (engine == "sglang" and decoder.name == "llama-3.1-8b")
    block = "fp8_block" if is_block else "fp8"
    has_small_cache = (
        engine == "trtllm"
        or (precision == "fp4" and not decoder.name.startswith("gpt-oss"))
        or (precision == "fp8" and decoder.name.startswith("llama") and engine != "sglang")
        or (is_blackwell and is_moe and precision == "fp8")
    )
    kv = "fp8" if has_small_cache else "bf16"
    match precision:
        case "" | "bf16":
            inner = outer = ffn = experts = "bf16"
        case "fp8":
            inner = outer = ffn = experts = block
        case "fp4" | "mxfp4" if decoder.name.startswith("gpt-oss"):
            inner = outer = ffn = "bf16"
            experts = "mxfp4"
        case "fp4" if is_moe:
            # NVFP4 checkpoints keep attention in bf16, but for DeepSeek's output projection, and
            # Qwen3.5's shared experts.
            inner, experts = "bf16", "nvfp4"
            outer = "nvfp4" if decoder.name == "deepseek-v3" else "bf16"
            ffn = "bf16" if decoder.name.startswith("qwen3.5") else "nvfp4"
        case "fp4":
            inner = outer = ffn = experts = "nvfp4"
        case "int4":
            inner = outer = ffn = "bf16"
            experts = "int4_wo"
        case _:
            return None
    return Formats(attention=inner, output=outer, ffn=ffn, experts=experts, kv=kv)
