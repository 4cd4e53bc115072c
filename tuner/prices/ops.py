"""An operation of a step, and what gives it a price.

A stack turns a model and a configuration into a list of operations (`Op`); prices turn an
operation into seconds. Stacks differ in their lists and in what overlaps, never in a price.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from profilers.records import Case, Direction
from profilers.work import PASSES
from tuner.config.columns import Numbers


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """Work of one device, or of one group of them: a row of a profile with its place in a step."""

    operation: str
    """Table of a profile (profilers/records.AXES), or an operation that no profiler measures."""
    axes: Mapping[str, Numbers]
    """Sizes: numbers, or arrays of one entry per configuration."""
    kind: str = ""
    dtype: str = ""
    """Number format of the operands; empty: that of the stack's linear layers, or none. A GEMM that
    states bf16 (head and router) keeps it under every recipe, because its share of the peak
    differs."""
    direction: Direction = ""
    """Forward or backward pass that the kernel belongs to; empty for collectives and copies."""
    part: str = ""
    """Part of the step that the seconds are reported under."""
    in_backward: bool = False
    count: int = 1
    """Number of times that it runs."""
    software: str = ""
    """Engine whose kernels it runs, where engines bring their own; empty: any."""

    @property
    def name(self) -> str:
        """Format the operation and its kind for people."""
        return "/".join(word for word in (self.operation, self.kind) if word)

    def case(self) -> Case:
        """Return what a profiler has to measure; sizes are whole numbers."""
        return Case(
            operation=self.operation,
            kind=self.kind,
            dtype=self.dtype,
            direction=self.direction,
            axes={axis: int(size) for axis, size in self.axes.items()},
        )


class Prices(Protocol):
    """Prices of operations on one kind of device and its links."""

    def seconds(self, op: Op, /) -> Numbers:
        """Wall time of running it once."""


RAGGED: Final = "ragged"
"""Kind of a grouped GEMM on rows as they fall (profilers/kernels/grouped_gemm.py)."""

SKINNY: Final = "skinny"
"""Kind of a GEMM of an adapter: one of its sizes is the rank."""

FROZEN: Final = "frozen"
"""Kind of an operation whose weights get no gradient."""


def adapted_kind(rank: int, *, has_input_gradient: bool) -> str:
    """Kind of a grouped GEMM of frozen experts with adapters (the same file)."""
    return f"lora{rank}" if has_input_gradient else f"lora{rank}-lowest"


BF16: Final = "bf16"
FP32: Final = "fp32"
BF16_BYTES: Final = 2.0


def gemm(m: Numbers, n: Numbers, k: Numbers, *, dtype: str = "", kind: str = "") -> Op:
    """[m, k] x [k, n]."""
    axes = {"m": m, "n": n, "k": k}
    return Op(operation="gemm", kind=kind, dtype=dtype, direction="forward", axes=axes)


def batched_gemm(batches: Numbers, m: Numbers, n: Numbers, k: Numbers) -> Op:
    """Independent GEMMs of attention, in one kernel."""
    axes = {"batches": batches, "m": m, "n": n, "k": k}
    return Op(operation="batched_gemm", dtype=BF16, direction="forward", axes=axes)


def memory_bound(moved_bytes: Numbers) -> Op:
    """Element-wise kernels that read and write so many bytes."""
    axes = {"bytes": moved_bytes}
    return Op(operation="memory_bound", dtype=BF16, direction="forward", axes=axes)


def on_rows(kind: str, rows: Numbers, width: Numbers, *, is_backward: bool) -> Op:
    """An indexing kernel over bf16 rows, of a kind that a profile measures by its own name.

    Where none did, the bytes that it moves stand for it. The kinds: profilers/kernels/memory_bound.
    """
    moved_bytes = PASSES[kind][is_backward] * BF16_BYTES * rows * width
    axes = {"bytes": moved_bytes, "rows": rows, "width": width}
    direction: Direction = "backward" if is_backward else "forward"
    return Op(operation="memory_bound", kind=kind, dtype=BF16, direction=direction, axes=axes)


class TrainedOp(NamedTuple):
    """An operation and its gradients."""

    forward: Op
    inputs: Op
    """Gradient of the inputs."""
    weights: Op
    """Gradient of the weights."""


def trained_gemm(
    m: Numbers, n: Numbers, k: Numbers, *, dtype: str = "", kind: str = ""
) -> TrainedOp:
    """[m, k] x [k, n]; its gradients are GEMMs of their own shapes."""
    return TrainedOp(
        forward=gemm(m, n, k, dtype=dtype, kind=kind),
        inputs=gemm(m, k, n, dtype=dtype, kind=kind),
        weights=gemm(n, k, m, dtype=dtype, kind=kind),
    )


def trained_experts(
    experts: Numbers, rows: Numbers, *, hidden: Numbers, ffn: Numbers, inner: Numbers
) -> TrainedOp:
    """[rows, hidden] x [hidden, inner] and [rows, ffn] x [ffn, hidden] of each expert."""
    forward = Op(
        operation="grouped_gemm",
        direction="forward",
        axes={"experts": experts, "largest": rows, "hidden": hidden, "ffn": ffn, "inner": inner},
    )
    return TrainedOp(
        forward=forward,
        inputs=replace(forward, direction="backward", kind="inputs"),
        weights=replace(forward, direction="backward", kind="weights"),
    )


def linear_scan(
    *,
    kind: str,
    batch: Numbers,
    sequence: Numbers,
    heads: Numbers,
    key_heads: Numbers,
    key_dim: Numbers,
    value_dim: Numbers,
    chunk: Numbers,
    is_delta: Numbers,
    decays_channels: Numbers,
) -> Op:
    """Linear attention's forward pass on one rank over a micro-batch, in chunks.

    Args:
        kind: of linear attention, as a profile names it; empty where columns differ.
        batch: sequences.
        sequence: tokens of one.
        heads: that have a state of key_dim x value_dim.
        key_heads: of keys; Mamba-2 computes its scores once for each.
        key_dim: of a key.
        value_dim: of a value.
        chunk: tokens that are computed together.
        is_delta: 1 for a delta rule, 0 for Mamba-2.
        decays_channels: 1 where every channel of a key has its own decay (KDA), 0 where heads do.
    """
    return Op(
        operation="linear_scan",
        kind=kind,
        dtype=BF16,
        direction="forward",
        axes={
            "batch": batch,
            "sequence": sequence,
            "heads": heads,
            "key_heads": key_heads,
            "key_dim": key_dim,
            "value_dim": value_dim,
            "chunk": chunk,
            "is_delta": is_delta,
            "decays_channels": decays_channels,
        },
    )


def attention(
    *,
    pairs: Numbers,
    batch: Numbers,
    sequence: Numbers,
    heads: Numbers,
    kv_heads: Numbers,
    head_dim: Numbers,
    value_dim: Numbers,
    queries: Numbers = 0.0,
) -> Op:
    """Flash attention's forward pass on one rank over a micro-batch.

    Args:
        pairs: of query and key that are computed, per head, all sequences together.
        batch: sequences.
        sequence: tokens of one.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: of queries and keys.
        value_dim: of values.
        queries: that its kernels begin, per head, all sequences together; in a ring of context
            parallelism those of the rank at each of its steps. 0: only pairs count.
    """
    return Op(
        operation="attention",
        dtype=BF16,
        direction="forward",
        axes={
            "pairs": pairs,
            "batch": batch,
            "sequence": sequence,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "value_dim": value_dim,
            "queries": queries,
        },
    )
