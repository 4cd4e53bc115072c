"""Minimum work of an operation: floating-point operations and bytes moved.

Letters: m, n, k of a GEMM; T tokens; H hidden; F ffn; E experts; B batch; S sequence; A heads;
G key-value heads; D head size; s bytes per element (2 for bf16, 4 for fp32).

    operation        flop forward, backward            bytes forward (backward is twice that)
    gemm             2 m n k, twice; once where frozen s (m k + n k + m n)
    grouped_gemm     6 T H F, twice                    s (3 E H F + T (2 H + 6 F))
    attention        2 B A S^2 D, 2.5 times            s B S D (2 A + 2 G)
    linear_scan      B S A (4 N P + 2 Q P + 2 Q N),    s B S (2 A P + 2 K N) + 16 B S A N P / Q
                     2.5 times; K key heads of N,
                     values of P, chunks of Q tokens
    linear_update    7 B A N P                         8 B A N P + s B (2 A P + 2 K N)
    index_scores     2 A D R, R pairs of a query and   s B (P D + S A (D + 1)) + 2 s R, P keys
                     a key that it sees
    memory_bound     0                                 s rows width x the kind's reads and writes
    optimizer        0                                 per parameter: adamw 28 (4 read, 3 written,
                                                       fp32), accumulate 8 + s, convert 4 + s
    copy             0                                 twice the bytes within a device, once across
    collective       0                                 the message times its bus factor
    rendezvous       0                                 none; the work before it is used
    link             0                                 the message
    every_rank       0                                 2 n^3 as bytes' worth; a copy twice its bytes
    storage          0                                 the bytes
    background_save  0                                 the bytes
    host_memory      0                                 the bytes
    restart          0                                 none; the ranks are used
    checkpoint_load  0                                 the bytes
    kv_conversion    0                                 2 T G D (latent T D) read and written, once
                                                       for every rank that holds it
    windowed_attention  2 B A D S min(S, 2 W)          as attention
    decode_attention 4 B A D P, P past tokens          s B P D 2 G, P at most the window
    latent_attention 2 B A S^2 (192 + 128) / 2         s B S A (2 * 192 + 2 * 128)
    latent_decode    2 B A P (576 + 512)               s B P 576
    latent_product   2 T A 128 512                     s (A 128 512 + T A (128 + 512))
    sparse_latent_attention  2 B A S min(P + S, 2048)  s B (A S 640 + (P + S) 576)
                     (576 + 512)
    sparse_latent_decode  2 B A min(P, 2048)           s B (min(P, 2048) 576 + P 128)
                     (576 + 512)
    gated_delta      6 B S V 128 128                   s B S 128 (2 K + 2 V), K and V heads
    moe              6 R H F, R = T K / expert rows    s (3 min(E, R) H F + R (2 H + 6 F)), E and F
                                                       those of one rank
    expert_all_to_all   0                              s T K H

The causal half is what attention's 2 B A S^2 D counts; its backward runs five GEMMs where the
forward formed two (Dao, FlashAttention-2, 2023). These are a base to which measured points add what
is missing (profilers/interpolation.py), so constants matter little and growth matters much.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ELEMENT_BYTES: Final[Mapping[str, int]] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "": 1}

PASSES: Final[Mapping[str, tuple[float, float]]] = {
    "rms_norm": (2.0, 3.0),
    "frozen_rms_norm": (2.0, 3.0),
    "swiglu": (3.0, 5.0),
    "rotary": (2.0, 2.0),
    "residual_add": (3.0, 0.0),
    "permute": (2.0, 2.0),
    "unpermute": (2.0, 3.0),
    "router": (3.0, 3.0),
    "cross_entropy": (2.0, 3.0),
    "embedding": (2.0, 2.0),
    "masked_fill": (3.0, 3.0),
}
"""Row widths read plus written, forward and backward, by kind of memory-bound operation."""

PICKED_TOKENS: Final = 2048.0
"""Past tokens that DeepSeek's indexer lets a query attend to (DeepSeek-V3.2-Exp, 2025)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Work:
    """Operations and bytes of several sizes of one operation."""

    flop: Floats
    bytes: Floats


def work(
    operation: str, *, kind: str, dtype: str, direction: str, axes: Mapping[str, Floats]
) -> Work:
    """Count what each size costs at least; `axes` holds one array per axis, all of one length."""
    size = float(ELEMENT_BYTES.get(dtype, 2))
    # Frozen weights have no gradient: the backward pass is as large as the forward pass.
    backward = direction == "backward" and not (kind == "frozen" or kind.startswith("lora"))
    if operation == "gemm":
        return _gemm(axes, size=size, backward=backward)
    if operation == "grouped_gemm":
        return _grouped_gemm(axes, size=size, backward=backward)
    if operation == "attention":
        return _attention(axes, size=size, backward=backward)
    if operation == "linear_scan":
        return _linear_scan(axes, size=size, backward=backward)
    if operation in _FORWARD_ONLY:
        return _FORWARD_ONLY[operation](axes, size)
    moved = _moved(operation, kind=kind, axes=axes, size=size, backward=backward)
    return Work(flop=np.zeros_like(moved), bytes=moved)


def _gemm(axes: Mapping[str, Floats], *, size: float, backward: bool) -> Work:
    m, n, k = axes["m"], axes["n"], axes["k"]
    times = 2.0 if backward else 1.0
    return Work(flop=times * 2.0 * m * n * k, bytes=times * size * (m * k + n * k + m * n))


def _grouped_gemm(axes: Mapping[str, Floats], *, size: float, backward: bool) -> Work:
    T, H, F, E = axes["tokens"], axes["hidden"], axes["ffn"], axes["experts"]
    times = 2.0 if backward else 1.0
    moved = size * (3.0 * E * H * F + T * (2.0 * H + 6.0 * F))
    return Work(flop=times * 6.0 * T * H * F, bytes=times * moved)


def _attention(axes: Mapping[str, Floats], *, size: float, backward: bool) -> Work:
    B, S, D = axes["batch"], axes["sequence"], axes["head_dim"]
    A, G = axes["heads"], axes["kv_heads"]
    moved = size * B * S * D * (2.0 * A + 2.0 * G)
    return Work(
        flop=(2.5 if backward else 1.0) * 2.0 * B * A * S * S * D,
        bytes=(2.0 if backward else 1.0) * moved,
    )


def _linear_scan(axes: Mapping[str, Floats], *, size: float, backward: bool) -> Work:
    tokens, A, Q = axes["batch"] * axes["sequence"], axes["heads"], axes["chunk"]
    N, P = axes["key_dim"], axes["value_dim"]
    moved = size * (2.0 * A * P + 2.0 * axes["key_heads"] * N) + 16.0 * A * N * P / Q
    flop = A * (4.0 * N * P + 2.0 * Q * P + 2.0 * Q * N)
    return Work(
        flop=(2.5 if backward else 1.0) * tokens * flop,
        bytes=(2.0 if backward else 1.0) * tokens * moved,
    )


def _linear_update(axes: Mapping[str, Floats], size: float) -> Work:
    B, A, N, P = (axes[a] for a in ("batch", "heads", "key_dim", "value_dim"))
    states = B * A * N * P
    return Work(
        flop=7.0 * states,
        bytes=8.0 * states + size * B * (2.0 * A * P + 2.0 * axes["key_heads"] * N),
    )


def _index_scores(axes: Mapping[str, Floats], size: float) -> Work:
    B, S, P, A, D = (axes[a] for a in ("batch", "sequence", "past", "heads", "head_dim"))
    pairs = B * S * np.where(P >= S, P - 0.5 * (S - 1.0), 0.5 * (P + 1.0))
    return Work(
        flop=2.0 * A * D * pairs,
        bytes=size * (B * (P * D + S * A * (D + 1.0)) + 2.0 * pairs),
    )


def _windowed_attention(axes: Mapping[str, Floats], size: float) -> Work:
    B, S, D = axes["batch"], axes["sequence"], axes["head_dim"]
    A, G = axes["heads"], axes["kv_heads"]
    seen = np.minimum(S, 2.0 * np.maximum(axes["window"], 1.0))
    return Work(flop=2.0 * B * A * D * S * seen, bytes=size * B * S * D * (2.0 * A + 2.0 * G))


def _decode_attention(axes: Mapping[str, Floats], size: float) -> Work:
    B, D, A, G = axes["batch"], axes["head_dim"], axes["heads"], axes["kv_heads"]
    window = np.where(axes["window"] > 0.0, axes["window"], np.inf)
    P = np.minimum(axes["past"], window)
    return Work(flop=4.0 * B * A * D * P, bytes=size * B * P * D * 2.0 * G)


def _latent_attention(axes: Mapping[str, Floats], size: float) -> Work:
    B, S, A = axes["batch"], axes["sequence"], axes["heads"]
    return Work(flop=B * A * S * S * (192.0 + 128.0), bytes=size * B * S * A * 640.0)


def _latent_decode(axes: Mapping[str, Floats], size: float) -> Work:
    B, P, A = axes["batch"], axes["past"], axes["heads"]
    return Work(flop=2.0 * B * A * P * (576.0 + 512.0), bytes=size * B * P * 576.0)


def _latent_product(axes: Mapping[str, Floats], size: float) -> Work:
    T, A = axes["tokens"], axes["heads"]
    return Work(
        flop=2.0 * T * A * 128.0 * 512.0, bytes=size * A * (128.0 * 512.0 + T * (128.0 + 512.0))
    )


def _sparse_latent_attention(axes: Mapping[str, Floats], size: float) -> Work:
    B, P, S, A = axes["batch"], axes["past"], axes["sequence"], axes["heads"]
    looked_at = np.minimum(P + S, PICKED_TOKENS)
    return Work(
        flop=2.0 * B * A * S * looked_at * (576.0 + 512.0),
        bytes=size * B * (A * S * 640.0 + (P + S) * 576.0),
    )


def _sparse_latent_decode(axes: Mapping[str, Floats], size: float) -> Work:
    B, P, A = axes["batch"], axes["past"], axes["heads"]
    looked_at = np.minimum(P, PICKED_TOKENS)
    return Work(
        flop=2.0 * B * A * looked_at * (576.0 + 512.0),
        bytes=size * B * (looked_at * 576.0 + P * 128.0),
    )


def _gated_delta(axes: Mapping[str, Floats], size: float) -> Work:
    B, S, K, V = (axes[a] for a in ("batch", "sequence", "key_heads", "value_heads"))
    return Work(
        flop=6.0 * B * S * V * 128.0 * 128.0, bytes=size * B * S * 128.0 * (2.0 * K + 2.0 * V)
    )


def _moe(axes: Mapping[str, Floats], size: float) -> Work:
    H, E = axes["hidden"], axes["experts"] / axes["expert"]
    F, R = axes["ffn"] / axes["tensor"], axes["tokens"] * axes["top_k"] / axes["expert"]
    moved = size * (3.0 * np.minimum(E, R) * H * F + R * (2.0 * H + 6.0 * F))
    return Work(flop=6.0 * R * H * F, bytes=moved)


def _expert_all_to_all(axes: Mapping[str, Floats], size: float) -> Work:
    moved = size * axes["tokens"] * axes["top_k"] * axes["hidden"]
    return Work(flop=np.zeros_like(moved), bytes=moved)


def _kv_conversion(axes: Mapping[str, Floats], *, kind: str, size: float) -> Floats:
    stored, _, wanted = kind.partition("/")
    is_latent = stored == "latent"
    holders = np.maximum(1.0, axes["tensor_to"] / (1.0 if is_latent else axes["heads"]))
    elements = (1.0 if is_latent else 2.0) * axes["tokens"] * axes["heads"] * axes["width"]
    written = float(ELEMENT_BYTES.get(wanted, 2)) if wanted else size
    return holders * elements * (size + written)


_FORWARD_ONLY: Final[Mapping[str, Callable[[Mapping[str, Floats], float], Work]]] = {
    "linear_update": _linear_update,
    "index_scores": _index_scores,
    "windowed_attention": _windowed_attention,
    "decode_attention": _decode_attention,
    "latent_attention": _latent_attention,
    "latent_decode": _latent_decode,
    "latent_product": _latent_product,
    "sparse_latent_attention": _sparse_latent_attention,
    "sparse_latent_decode": _sparse_latent_decode,
    "gated_delta": _gated_delta,
    "moe": _moe,
    "expert_all_to_all": _expert_all_to_all,
}


def _moved(
    operation: str, *, kind: str, axes: Mapping[str, Floats], size: float, backward: bool
) -> Floats:
    if operation == "memory_bound":
        forward_passes, backward_passes = PASSES.get(kind, (2.0, 3.0))
        passes = backward_passes if backward else forward_passes
        return passes * size * axes["rows"] * axes["width"]
    if operation == "optimizer":
        per_parameter = {"accumulate": 8.0 + size, "convert": 4.0 + size}
        return per_parameter.get(kind, 28.0) * axes["parameters"]
    if operation == "copy":
        return (2.0 if kind == "device" else 1.0) * axes["bytes"]
    if operation == "collective":
        ranks = np.maximum(axes["ranks"], 1.0)
        share = (ranks - 1.0) / ranks
        factor = {"all_reduce": 2.0 * share, "send_recv": np.ones_like(share)}
        return axes["bytes"] * factor.get(kind.partition("/")[0], share)
    if operation in ("storage", "background_save", "host_memory", "checkpoint_load", "link"):
        return axes["bytes"]
    if operation == "every_rank":
        return 2.0 * axes["size"] if kind == "copy" else axes["size"] ** 3 / 8.0
    if operation == "kv_conversion":
        return _kv_conversion(axes, kind=kind, size=size)
    if operation == "rendezvous":
        return axes["work_us"]
    if operation == "restart":
        return axes["ranks"]
    raise ValueError(f"the work of operation {operation!r} is not described")
