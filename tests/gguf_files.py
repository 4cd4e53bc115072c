"""Small GGUF files of several architectures, whose tensors hold zeros."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Final

Value = str | int | float | bool | list[int] | list[bool]
Tensors = dict[str, tuple[tuple[int, ...], str]]

TYPES: Final = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
    "Q6_K": (14, 256, 210),
    "MXFP4": (39, 32, 17),
}
"""Number of a type, the elements of a block and its bytes."""
VOCABULARY: Final = 8192


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _value(value: Value) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    kind = 7 if isinstance(value[0], bool) else 4
    items = b"".join(struct.pack("<?" if kind == 7 else "<I", item) for item in value)
    return struct.pack("<IIQ", 9, kind, len(value)) + items


def tensor_bytes(shape: tuple[int, ...], kind: str) -> int:
    """The bytes of a tensor."""
    _, elements, size = TYPES[kind]
    count = 1
    for length in shape:
        count *= length
    return count // elements * size


def write_gguf(path: Path, values: Mapping[str, Value], tensors: Tensors) -> Path:
    """Write a file whose tensors are zeros, as a sparse file."""
    offset, infos = 0, []
    for name, (shape, kind) in tensors.items():
        dimensions = b"".join(struct.pack("<Q", length) for length in shape)
        infos.append(
            _text(name)
            + struct.pack("<I", len(shape))
            + dimensions
            + struct.pack("<IQ", TYPES[kind][0], offset)
        )
        offset += -(-tensor_bytes(shape, kind) // 32) * 32
    pairs = [_text(key) + _value(value) for key, value in values.items()]
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values))
    header += b"".join(pairs) + b"".join(infos)
    start = -(-len(header) // 32) * 32
    with path.open("wb") as file:
        file.write(header)
        file.truncate(start + offset)
    return path


def _values(architecture: str, **sizes: Value) -> dict[str, Value]:
    common: dict[str, Value] = {
        "general.architecture": architecture,
        "general.name": f"small {architecture}",
        "tokenizer.ggml.model": "no_vocab",
    }
    stated: dict[str, Value] = {
        "vocab_size": VOCABULARY,
        "context_length": 131_072,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 10_000.0,
        **sizes,
    }
    return common | {f"{architecture}.{key}": value for key, value in stated.items()}


def _attention(layer: int, *, hidden: int, heads: int, kv_heads: int, head: int) -> Tensors:
    name = f"blk.{layer}."
    return {
        f"{name}attn_norm.weight": ((hidden,), "F32"),
        f"{name}attn_q.weight": ((hidden, heads * head), "Q4_K"),
        f"{name}attn_k.weight": ((hidden, kv_heads * head), "Q4_K"),
        f"{name}attn_v.weight": ((hidden, kv_heads * head), "Q6_K"),
        f"{name}attn_output.weight": ((heads * head, hidden), "Q4_K"),
    }


def _experts(layer: int, *, hidden: int, experts: int, width: int, kind: str, down: str) -> Tensors:
    name = f"blk.{layer}."
    return {
        f"{name}ffn_gate_inp.weight": ((hidden, experts), "F32"),
        f"{name}ffn_gate_exps.weight": ((hidden, width, experts), kind),
        f"{name}ffn_up_exps.weight": ((hidden, width, experts), kind),
        f"{name}ffn_down_exps.weight": ((width, hidden, experts), down),
    }


def _dense(layer: int, *, hidden: int, width: int) -> Tensors:
    name = f"blk.{layer}."
    return {
        f"{name}ffn_gate.weight": ((hidden, width), "Q4_K"),
        f"{name}ffn_up.weight": ((hidden, width), "Q4_K"),
        f"{name}ffn_down.weight": ((width, hidden), "Q6_K"),
    }


def _ends(hidden: int, *, tied: bool = False) -> Tensors:
    head = {} if tied else {"output.weight": ((hidden, VOCABULARY), "Q6_K")}
    return {
        "token_embd.weight": ((hidden, VOCABULARY), "Q4_K"),
        "output_norm.weight": ((hidden,), "F32"),
        **head,
    }


def moe(path: Path, **sizes: int) -> Path:
    """Write a model of the architecture of Qwen3 MoE, with mixed types of tensors."""
    return write_gguf(path, *_moe(**sizes))


def split(path: Path, **sizes: int) -> tuple[Path, Path]:
    """Write the same model as two shards."""
    values, tensors = _moe(**sizes)
    names = list(tensors)
    halves = names[: len(names) // 2], names[len(names) // 2 :]
    stated: dict[str, Value] = {"split.count": 2, "split.tensors.count": len(names)}
    shards = [
        write_gguf(
            path.with_name(f"{path.name}-{shard + 1:05d}-of-00002.gguf"),
            {**(values if not shard else {}), **stated, "split.no": shard},
            {name: tensors[name] for name in half},
        )
        for shard, half in enumerate(halves)
    ]
    return shards[0], shards[1]


def _moe(
    *,
    layers: int = 8,
    hidden: int = 1024,
    heads: int = 8,
    experts: int = 16,
    used: int = 4,
    width: int = 512,
) -> tuple[dict[str, Value], Tensors]:
    tensors = _ends(hidden)
    for layer in range(layers):
        tensors |= _attention(layer, hidden=hidden, heads=heads, kv_heads=2, head=128)
        name = f"blk.{layer}."
        tensors |= {f"{name}attn_{part}_norm.weight": ((128,), "F32") for part in "qk"}
        tensors |= {f"{name}ffn_norm.weight": ((hidden,), "F32")}
        down = "Q6_K" if layer % 2 else "Q4_K"
        tensors |= _experts(
            layer, hidden=hidden, experts=experts, width=width, kind="Q4_K", down=down
        )
    values = _values(
        "qwen3moe",
        block_count=layers,
        embedding_length=hidden,
        feed_forward_length=2048,
        expert_feed_forward_length=width,
        expert_count=experts,
        expert_used_count=used,
        **{
            "attention.head_count": heads,
            "attention.head_count_kv": 2,
            "attention.key_length": 128,
            "attention.value_length": 128,
        },
    )
    return values, tensors


def dense(
    path: Path, *, layers: int = 6, hidden: int = 768, heads: int = 12, width: int = 2048
) -> Path:
    """Write a model of the architecture of Qwen3, with tied embeddings."""
    tensors = _ends(hidden, tied=True)
    for layer in range(layers):
        tensors |= _attention(layer, hidden=hidden, heads=heads, kv_heads=4, head=64)
        name = f"blk.{layer}."
        tensors |= {f"{name}attn_{part}_norm.weight": ((64,), "F32") for part in "qk"}
        tensors |= {f"{name}ffn_norm.weight": ((hidden,), "F32")}
        tensors |= _dense(layer, hidden=hidden, width=width)
    values = _values(
        "qwen3",
        block_count=layers,
        embedding_length=hidden,
        feed_forward_length=width,
        **{
            "attention.head_count": heads,
            "attention.head_count_kv": 4,
            "attention.key_length": 64,
            "attention.value_length": 64,
        },
    )
    return write_gguf(path, values, tensors)


def sliding_window(path: Path, *, layers: int = 6) -> Path:
    """Write a model of the architecture of gpt-oss."""
    hidden, heads, head, experts, width = 512, 8, 64, 8, 512
    tensors = _ends(hidden)
    for layer in range(layers):
        name = f"blk.{layer}."
        tensors |= _attention(layer, hidden=hidden, heads=heads, kv_heads=2, head=head)
        tensors |= _experts(
            layer, hidden=hidden, experts=experts, width=width, kind="MXFP4", down="MXFP4"
        )
        tensors |= {
            f"{name}post_attention_norm.weight": ((hidden,), "F32"),
            f"{name}attn_sinks.weight": ((heads,), "F32"),
            f"{name}attn_output.bias": ((hidden,), "F32"),
            f"{name}ffn_gate_inp.bias": ((experts,), "F32"),
            f"{name}ffn_gate_exps.bias": ((width, experts), "F32"),
            f"{name}ffn_up_exps.bias": ((width, experts), "F32"),
            f"{name}ffn_down_exps.bias": ((hidden, experts), "F32"),
        }
    values = _values(
        "gpt-oss",
        block_count=layers,
        embedding_length=hidden,
        feed_forward_length=width,
        expert_feed_forward_length=width,
        expert_count=experts,
        expert_used_count=4,
        **{
            "attention.head_count": heads,
            "attention.head_count_kv": 2,
            "attention.key_length": head,
            "attention.value_length": head,
            "attention.sliding_window": 128,
        },
    )
    return write_gguf(path, values, tensors)


def latent(path: Path, *, layers: int = 5) -> Path:
    """Write a model of the architecture of DeepSeek-V3, one layer of it dense."""
    hidden, heads, rank, rope, nope, value = 512, 8, 256, 64, 128, 128
    tensors = _ends(hidden)
    for layer in range(layers):
        name = f"blk.{layer}."
        tensors |= {
            f"{name}attn_norm.weight": ((hidden,), "F32"),
            f"{name}attn_q_a_norm.weight": ((256,), "F32"),
            f"{name}attn_kv_a_norm.weight": ((rank,), "F32"),
            f"{name}attn_q_a.weight": ((hidden, 256), "Q4_K"),
            f"{name}attn_q_b.weight": ((256, heads * (nope + rope)), "Q4_K"),
            f"{name}attn_kv_a_mqa.weight": ((hidden, rank + rope), "Q4_K"),
            f"{name}attn_k_b.weight": ((nope, rank, heads), "Q8_0"),
            f"{name}attn_v_b.weight": ((rank, value, heads), "Q8_0"),
            f"{name}attn_output.weight": ((heads * value, hidden), "Q4_K"),
            f"{name}ffn_norm.weight": ((hidden,), "F32"),
        }
        if not layer:
            tensors |= _dense(layer, hidden=hidden, width=1024)
            continue
        tensors |= _experts(layer, hidden=hidden, experts=16, width=256, kind="Q4_K", down="Q6_K")
        tensors |= {
            f"{name}exp_probs_b.bias": ((16,), "F32"),
            f"{name}ffn_gate_shexp.weight": ((hidden, 256), "Q4_K"),
            f"{name}ffn_up_shexp.weight": ((hidden, 256), "Q4_K"),
            f"{name}ffn_down_shexp.weight": ((256, hidden), "Q6_K"),
        }
    values = _values(
        "deepseek2",
        block_count=layers,
        embedding_length=hidden,
        feed_forward_length=1024,
        expert_feed_forward_length=256,
        expert_count=16,
        expert_used_count=4,
        expert_shared_count=1,
        expert_gating_func=2,
        leading_dense_block_count=1,
        **{
            "attention.head_count": heads,
            "attention.head_count_kv": 1,
            "attention.q_lora_rank": 256,
            "attention.kv_lora_rank": rank,
            "attention.key_length": rank + rope,
            "attention.value_length": rank,
            "attention.key_length_mla": nope + rope,
            "attention.value_length_mla": value,
            "rope.dimension_count": rope,
        },
    )
    return write_gguf(path, values, tensors)
