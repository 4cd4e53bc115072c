"""The models that published serving runs name, from their public `config.json` files.

Widths are those of the checkpoints on huggingface.co under the names given. DeepSeek-R1, V3 and
V3.1 are one model. The storage formats are those of the quantised checkpoints (their
`quantization_config` or `hf_quant_config.json`), by the precision that a row states.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from tuner.costs.serve.decoder import (
    AttentionKind,
    Decoder,
    DecoderAttention,
    Experts,
    Formats,
    Layers,
    linear_mixer,
)
from tuner.spec.linear_attention import LinearAttention, LinearName
from tuner.spec.sparse_attention import Indexer


def _grouped(
    heads: int, kv_heads: int, *, head_dim: int = 128, has_gate: bool = False, window: int = 0
) -> DecoderAttention:
    return DecoderAttention(
        kind=AttentionKind.GROUPED,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        has_gate=has_gate,
        window=window,
    )


def _latent(heads: int) -> DecoderAttention:
    """DeepSeek-V3's MLA, whose widths Kimi-K2 shares."""
    return DecoderAttention(
        kind=AttentionKind.LATENT,
        heads=heads,
        kv_heads=heads,
        head_dim=192,
        query_rank=1536,
        kv_rank=512,
        rope_dim=64,
        value_dim=128,
    )


def _dense(
    name: str, *, hidden: int, vocab: int, layers: int, ffn: int, attention: DecoderAttention
) -> Decoder:
    return Decoder(
        name=name,
        hidden=hidden,
        vocab=vocab,
        layers=(Layers(count=layers, attention=attention, dense_ffn=ffn),),
    )


DEEPSEEK_V3: Final = Decoder(
    name="deepseek-v3",
    hidden=7168,
    vocab=129280,
    layers=(
        Layers(count=3, attention=_latent(128), dense_ffn=18432),
        Layers(count=58, attention=_latent(128), dense_ffn=0),
    ),
    experts=Experts(num=256, top_k=8, ffn=2048, shared_ffn=2048),
)
KIMI_K2: Final = Decoder(
    name="kimi-k2",
    hidden=7168,
    vocab=163840,
    layers=(
        Layers(count=1, attention=_latent(64), dense_ffn=18432),
        Layers(count=60, attention=_latent(64), dense_ffn=0),
    ),
    experts=Experts(num=384, top_k=8, ffn=2048, shared_ffn=2048),
)
_GLM_ATTENTION: Final = DecoderAttention(
    kind=AttentionKind.SPARSE_LATENT,
    heads=64,
    kv_heads=64,
    head_dim=256,
    query_rank=2048,
    kv_rank=512,
    rope_dim=64,
    value_dim=256,
    indexer=Indexer(num_heads=32, head_dim=128, top_k=2048),
    architecture="GlmMoeDsaForCausalLM",
)
GLM_5: Final = Decoder(
    name="glm-5",
    hidden=6144,
    vocab=154880,
    layers=(
        Layers(count=3, attention=_GLM_ATTENTION, dense_ffn=12288),
        Layers(count=75, attention=_GLM_ATTENTION, dense_ffn=0),
    ),
    experts=Experts(num=256, top_k=8, ffn=2048, shared_ffn=2048),
)
MINIMAX_M2: Final = Decoder(
    name="minimax-m2",
    hidden=3072,
    vocab=200064,
    layers=(Layers(count=62, attention=_grouped(48, 8), dense_ffn=0),),
    experts=Experts(num=256, top_k=8, ffn=1536),
)
QWEN35_397B: Final = Decoder(
    name="qwen3.5-397b-a17b",
    hidden=4096,
    vocab=248320,
    layers=(
        Layers(
            count=45,
            attention=linear_mixer(
                LinearAttention(
                    kind=LinearName.GATED_DELTA,
                    num_key_heads=16,
                    num_value_heads=64,
                    key_head_dim=128,
                    value_head_dim=128,
                    conv_kernel=4,
                    chunk_size=64,
                )
            ),
            dense_ffn=0,
        ),
        Layers(count=15, attention=_grouped(32, 2, head_dim=256, has_gate=True), dense_ffn=0),
    ),
    experts=Experts(num=512, top_k=10, ffn=1024, shared_ffn=1024),
)
LLAMA_8B: Final = _dense(
    "llama-3.1-8b", hidden=4096, vocab=128256, layers=32, ffn=14336, attention=_grouped(32, 8)
)
LLAMA_70B: Final = _dense(
    "llama-3.1-70b", hidden=8192, vocab=128256, layers=80, ffn=28672, attention=_grouped(64, 8)
)
LLAMA_405B: Final = _dense(
    "llama-3.1-405b", hidden=16384, vocab=128256, layers=126, ffn=53248, attention=_grouped(128, 8)
)
QWEN3_32B: Final = _dense(
    "qwen3-32b", hidden=5120, vocab=151936, layers=64, ffn=25600, attention=_grouped(64, 8)
)
QWEN3_235B: Final = Decoder(
    name="qwen3-235b-a22b",
    hidden=4096,
    vocab=151936,
    layers=(Layers(count=94, attention=_grouped(64, 4), dense_ffn=0),),
    experts=Experts(num=128, top_k=8, ffn=1536),
)

QWEN3_8B: Final = _dense(
    "qwen3-8b", hidden=4096, vocab=151936, layers=36, ffn=12288, attention=_grouped(32, 8)
)
QWEN3_30B: Final = Decoder(
    name="qwen3-30b-a3b",
    hidden=2048,
    vocab=151936,
    layers=(Layers(count=48, attention=_grouped(32, 4), dense_ffn=0),),
    experts=Experts(num=128, top_k=8, ffn=768),
)
QWEN3_480B: Final = Decoder(
    name="qwen3-coder-480b-a35b",
    hidden=6144,
    vocab=151936,
    layers=(Layers(count=62, attention=_grouped(96, 8), dense_ffn=0),),
    experts=Experts(num=160, top_k=8, ffn=2560),
)
MIXTRAL_8X7B: Final = Decoder(
    name="mixtral-8x7b",
    hidden=4096,
    vocab=32000,
    layers=(Layers(count=32, attention=_grouped(32, 8), dense_ffn=0),),
    experts=Experts(num=8, top_k=2, ffn=14336),
)
MIXTRAL_8X22B: Final = Decoder(
    name="mixtral-8x22b",
    hidden=6144,
    vocab=32000,
    layers=(Layers(count=56, attention=_grouped(48, 8), dense_ffn=0),),
    experts=Experts(num=8, top_k=2, ffn=16384),
)
_V32_ATTENTION: Final = replace(
    _latent(128),
    kind=AttentionKind.SPARSE_LATENT,
    indexer=Indexer(num_heads=64, head_dim=128, top_k=2048),
    architecture="DeepseekV32ForCausalLM",
)
DEEPSEEK_V32: Final = replace(
    DEEPSEEK_V3,
    name="deepseek-v3.2",
    layers=(
        Layers(count=3, attention=_V32_ATTENTION, dense_ffn=18432),
        Layers(count=58, attention=_V32_ATTENTION, dense_ffn=0),
    ),
)


def _gpt_oss(name: str, *, layers: int, experts: int) -> Decoder:
    """Every other layer looks back on 128 tokens."""
    return Decoder(
        name=name,
        hidden=2880,
        vocab=201088,
        layers=(
            Layers(count=layers // 2, attention=_grouped(64, 8, head_dim=64), dense_ffn=0),
            Layers(
                count=layers // 2, attention=_grouped(64, 8, head_dim=64, window=128), dense_ffn=0
            ),
        ),
        experts=Experts(num=experts, top_k=4, ffn=2880),
    )


GPT_OSS_120B: Final = _gpt_oss("gpt-oss-120b", layers=36, experts=128)
GPT_OSS_20B: Final = _gpt_oss("gpt-oss-20b", layers=24, experts=32)

_BY_WORD: Final[Mapping[str, Decoder]] = MappingProxyType(
    {
        "deepseek-r1": DEEPSEEK_V3,
        "deepseek-v3": DEEPSEEK_V3,
        "deepseek-v3.2": DEEPSEEK_V32,
        "kimi-k2": KIMI_K2,
        "glm-5": GLM_5,
        "minimax-m2": MINIMAX_M2,
        "qwen3.5-397b": QWEN35_397B,
        "qwen3-235b": QWEN3_235B,
        "qwen3-32b": QWEN3_32B,
        "qwen3-8b": QWEN3_8B,
        "qwen3-30b": QWEN3_30B,
        "qwen3-coder-480b": QWEN3_480B,
        "mixtral-8x7b": MIXTRAL_8X7B,
        "mixtral-8x22b": MIXTRAL_8X22B,
        "gpt-oss-120b": GPT_OSS_120B,
        "gpt-oss-20b": GPT_OSS_20B,
        "llama-3.1-8b": LLAMA_8B,
        "llama-3.1-70b": LLAMA_70B,
        "llama-3.1-405b": LLAMA_405B,
        "llama-3.3-70b": LLAMA_70B,
    }
)


def find_decoder(path: str) -> Decoder | None:
    """The model that a path means, None where it is not known."""
    name = path.rsplit("/", 1)[-1].lower()
    words = [word for word in _BY_WORD if word in name]
    return _BY_WORD[max(words, key=len)] if words else None


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
