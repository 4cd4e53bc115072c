"""Seconds of attention kernels from measured tables, whichever engines brought them.

The own engine's kernels count where they were measured, for compressed attention (MLA) the fastest
of all. Beyond the longest prompt measured, attention grows with the square.

Letters: Q query points.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from tuner.prices.ops import Op
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.rated_attention import PROMPT_S
from tuner.prices.serve.tables import KernelTables, Key

STORED: Final = "bf16"
"""Number format of the queries, in every table."""


def measured_attention_s(tables: KernelTables, op: Op) -> Floats | None:
    """Return the seconds of an attention kernel; None where no table holds its shape."""
    measured = _MEASURED.get(op.operation)
    return None if measured is None else measured(tables, op)


def _decode_attention(tables: KernelTables, op: Op) -> Floats | None:
    n_Q, past_Q, window = _sizes(op, "batch", "past", "window")
    if window > 0.0:
        past_Q = np.minimum(past_Q, window)
    keys: list[Key] = [
        (software, kind, STORED, *_heads(op), 0)
        for software in _softwares(tables, op)
        for kind in dict.fromkeys((op.kind, ""))
    ]
    return next(_planes_s(tables, op, keys, n_Q, past_Q), None)


def _attention(tables: KernelTables, op: Op) -> Floats | None:
    keys: list[Key] = [
        (software, kind, STORED, *_heads(op))
        for software in _softwares(tables, op)
        for kind in (op.kind, "")
    ]
    return next(_prompts_s(tables, op, keys), None)


def _latent_product(tables: KernelTables, op: Op) -> Floats | None:
    (tokens_Q,) = _sizes(op, "tokens")
    keys: list[Key] = [
        (software, op.kind, dtype, int(op.axes["heads"]))
        for dtype in dict.fromkeys((op.dtype, STORED))
        for software in _softwares(tables, op)
    ]
    curves = (tables.curve(op.operation, key) for key in keys)
    return next((curve.seconds(tokens_Q) for curve in curves if curve is not None), None)


def _latent_decode(tables: KernelTables, op: Op) -> Floats | None:
    sizes = _sizes(op, "batch", "past")
    measured = list(_planes_s(tables, op, _latent_keys(tables, op), *sizes))
    return np.asarray(np.min(measured, axis=0)) if measured else None


def _latent_attention(tables: KernelTables, op: Op) -> Floats | None:
    measured = list(_prompts_s(tables, op, _latent_keys(tables, op)))
    return np.asarray(np.min(measured, axis=0)) if measured else None


def _latent_keys(tables: KernelTables, op: Op) -> list[Key]:
    heads = int(op.axes["heads"])
    return [(software, op.kind, STORED, heads) for software in _softwares(tables, op)]


def _sparse_decode(tables: KernelTables, op: Op) -> Floats | None:
    sizes = _sizes(op, "batch", "past")
    return next(_planes_s(tables, op, _sparse_keys(tables, op), *sizes), None)


def _sparse_attention(tables: KernelTables, op: Op) -> Floats | None:
    (s_Q,) = _sizes(op, "sequence")
    curves = (tables.curve(op.operation, key) for key in _sparse_keys(tables, op))
    return next((curve.seconds(s_Q) for curve in curves if curve is not None), None)


def _sparse_keys(tables: KernelTables, op: Op) -> list[Key]:
    """The kind names the architecture, the cache where it is fp8, and the GEMMs of the module."""
    architecture, *_, gemm = op.kind.split("/")
    others = (f"{architecture}/{gemm}", f"{architecture}/kv_fp8/{gemm}")
    return [
        (software, kind, STORED, int(op.axes["heads"]))
        for software in _softwares(tables, op)
        for kind in dict.fromkeys((op.kind, *others))
    ]


def _gated_delta(tables: KernelTables, op: Op) -> Floats | None:
    """Convolution and recurrence; the state is of fixed size, so the past does not count."""
    (m_Q,) = _sizes(op, "tokens")
    tail = (STORED, int(op.axes["key_heads"]), int(op.axes["value_heads"]))
    for software in _softwares(tables, op):
        kinds = {
            str(key[1])
            for key in tables.shapes(op.operation)
            if key[0] == software and str(key[1]).startswith(op.kind) and key[2:] == tail
        }
        keys: list[Key] = [(software, kind, *tail) for kind in sorted(kinds)]
        if len(keys) < 2:
            continue
        if op.kind == "generation":
            parts = list(_planes_s(tables, op, keys, m_Q, np.ones_like(m_Q)))
        else:
            curves = [tables.curve(op.operation, key) for key in keys]
            parts = [curve.seconds(m_Q) for curve in curves if curve is not None]
        return np.asarray(np.sum(parts, axis=0))
    return None


def _sizes(op: Op, *axes: str) -> list[Floats]:
    return [np.asarray(op.axes[axis], dtype=np.float64) for axis in axes]


def _heads(op: Op) -> tuple[int, int, int]:
    return int(op.axes["heads"]), int(op.axes["kv_heads"]), int(op.axes["head_dim"])


def _softwares(tables: KernelTables, op: Op) -> list[str]:
    """Engines with measurements, the own one first."""
    names = tables.softwares(op.operation)
    return sorted(names, key=lambda name: (name != op.software, name))


def _planes_s(
    tables: KernelTables, op: Op, keys: Sequence[Key], x_Q: Floats, y_Q: Floats
) -> Iterator[Floats]:
    planes = (tables.plane(op.operation, key) for key in keys)
    return (plane.seconds(x_Q, y_Q) for plane in planes if plane is not None)


def _prompts_s(tables: KernelTables, op: Op, keys: Sequence[Key]) -> Iterator[Floats]:
    b_Q, s_Q = _sizes(op, "batch", "sequence")
    curves = (tables.curve(op.operation, key) for key in keys)
    return (
        _batched_s(curve.seconds(s_Q) * np.maximum(s_Q / curve.largest, 1.0), b_Q)
        for curve in curves
        if curve is not None
    )


def _batched_s(single_s_Q: Floats, b_Q: Floats) -> Floats:
    """Seconds of b sequences in one kernel, which starts once."""
    return single_s_Q + (b_Q - 1.0) * np.maximum(single_s_Q - PROMPT_S, 0.0)


_MEASURED: Final[Mapping[str, Callable[[KernelTables, Op], Floats | None]]] = {
    "decode_attention": _decode_attention,
    "attention": _attention,
    "latent_product": _latent_product,
    "latent_decode": _latent_decode,
    "latent_attention": _latent_attention,
    "sparse_latent_decode": _sparse_decode,
    "sparse_latent_attention": _sparse_attention,
    "gated_delta": _gated_delta,
}
