"""What an operation has to do at least: floating-point operations and bytes moved.

Letters: m, n, k of a product; T tokens; H hidden; F ffn; E experts; B batch; S sequence; A heads;
G key-value heads; D head size; s bytes per element (2 for bf16, 4 for fp32).

    operation        flop forward, backward            bytes forward (backward is twice that)
    gemm             2 m n k, twice                    s (m k + n k + m n)
    grouped_gemm     6 T H F, twice                    s (3 E H F + T (2 H + 6 F))
    attention        2 B A S^2 D, 2.5 times            s B S D (2 A + 2 G)
    memory_bound     0                                 s rows width x the kind's reads and writes
    optimizer        0                                 per parameter: adamw 28 (4 read, 3 written,
                                                       fp32), accumulate 8 + s, convert 4 + s
    copy             0                                 twice the bytes within a device, once across
    collective       0                                 the message times its bus factor
    rendezvous       0                                 none; the work before it stands in
    storage          0                                 the bytes

The causal half is what attention's 2 B A S^2 D counts; its backward forms five products where the
forward formed two (Dao, FlashAttention-2, 2023). These are a base to which measured points add what
is missing (profilers/interpolation.py), so constants matter little and growth matters much.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ELEMENT_BYTES: Final[Mapping[str, int]] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 1, "": 1}

PASSES: Final[Mapping[str, tuple[float, float]]] = {
    "rms_norm": (2.0, 3.0),
    "swiglu": (3.0, 5.0),
    "rotary": (2.0, 2.0),
    "residual_add": (3.0, 0.0),
    "permute": (2.0, 2.0),
    "unpermute": (2.0, 3.0),
    "router": (3.0, 3.0),
    "cross_entropy": (2.0, 3.0),
    "embedding": (2.0, 2.0),
}
"""Row widths read plus written, forward and backward, by kind of memory-bound operation."""


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
    backward = direction == "backward"
    if operation == "gemm":
        return _gemm(axes, size=size, backward=backward)
    if operation == "grouped_gemm":
        return _grouped_gemm(axes, size=size, backward=backward)
    if operation == "attention":
        return _attention(axes, size=size, backward=backward)
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
        return axes["bytes"] * factor.get(kind, share)
    if operation == "storage":
        return axes["bytes"]
    if operation == "rendezvous":
        return axes["work_us"]
    raise ValueError(f"the work of operation {operation!r} is not described")
