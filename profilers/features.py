"""Columns of the cost model that is fitted to measured points: the work that a kernel consists of.

Every kernel has calls, floating-point operations and bytes (profilers/work.py). With enough points
the work is split further, by what a processor or an accelerator executes:

    gemm, grouped_gemm  each operand and the result separately (packing differs from writing), GEMMs
                        padded to whole vectors, and the tails of rows that do not fill a vector
    gemm                GEMMs whose rows begin off a multiple of 16 bytes, which neither vector
                        loads nor tensor cores like (NVIDIA, Matrix Multiplication Background)
    grouped_gemm        a call for each expert, whose rows are processed in whole blocks in bf16,
                        the rest of the last one separately (profilers/steps/experts.py); and SwiGLU
                        over the tail of a row, element by element
    attention           GEMMs of the blocks of scores that are computed, their softmax, the blocks'
                        calls, tails of rows of scores, sizes that do not fill a vector either, and
                        lengths for which PyTorch takes smaller blocks
    memory_bound        rows beside bytes (every row starts anew), the tail of a row, which is
                        processed element by element, and the first vector of a row
    kv_conversion       pieces of each rank, tokens, pages, and tokens that do not fill a page,
                        which are copied once more (profilers/kv_transfer/pages.py)

A vector is a line of `LINE_BYTES`: one AVX-512 register or a cache line; an accelerator's loads are
coalesced by the same 64 or 128 bytes. PyTorch's loops over elements on processors take two vectors
at a time and then single elements (vectorized_loop in aten/src/ATen/native/cpu/Loops.h), so the
rest of two vectors has a column of its own. Columns that explain nothing get no weight, as weights
are never negative (profilers/non_negative.py).

Letters: N points, A axes in the order of `records.AXES`, F columns; others as in profilers/work.py.
"""

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from profilers.records import AXES
from profilers.steps.loads import ROW_BLOCK
from profilers.work import ELEMENT_BYTES, work

Floats = NDArray[np.float64]

LINE_BYTES: Final = 64
_LANES_RATIO: Final = 16 / LINE_BYTES
KEY_BLOCK: Final = 512
"""Keys that PyTorch's attention on processors takes together, whole blocks of them even where a
causal mask hides a part (aten/src/ATen/native/cpu/FlashAttentionKernel.cpp). Accelerators leave out
more; there the difference is left to what Kriging adds."""
QUERY_BLOCKS: Final = ((192, 32), (768, 64))
"""Limits of the number of queries, and the block that fewer are taken in (the same file)..."""
QUERY_BLOCK: Final = 256
"""...and the block from the last limit on."""


def plain(
    operation: str, *, kind: str, dtype: str, direction: str, axes_NA: Floats, calls_N: Floats
) -> Floats:
    """Calls, operations and bytes of every point."""
    needed = work(
        operation, kind=kind, dtype=dtype, direction=direction, axes=_named(operation, axes_NA)
    )
    return np.stack([calls_N, needed.flop, needed.bytes], axis=1)


def detailed(operation: str, *, dtype: str, axes_NA: Floats) -> Floats | None:
    """The finer columns; None for operations without them.

    Directions share their columns: a backward repeats the forward's kinds of work.
    """
    if operation not in _DETAILED:
        return None
    vector = LINE_BYTES / ELEMENT_BYTES.get(dtype, 2)
    return np.stack(_DETAILED[operation](_named(operation, axes_NA), vector), axis=1)


def _gemm(axes: Mapping[str, Floats], vector: float) -> list[Floats]:
    m, n, k = axes["m"], axes["n"], axes["k"]
    padded = _up(m, vector) * _up(n, vector) * _up(k, vector)
    tails = [m * k * (n % vector), m * n * (k % vector), n * k * (m % vector)]
    lanes = _LANES_RATIO * vector
    askew = [m * n * k * (size % lanes != 0.0) for size in (n, k)]
    return [np.ones_like(m), m * n * k, padded, m * n, m * k, n * k, *tails, *askew]


def _grouped_gemm(axes: Mapping[str, Floats], vector: float) -> list[Floats]:
    T, H, F, E = axes["tokens"], axes["hidden"], axes["ffn"], axes["experts"]
    rows, split = T, []
    if vector == LINE_BYTES / ELEMENT_BYTES["bf16"]:
        rows, is_split = _block_rows(T, E, axes["largest"])
        split = [is_split]
    padded = rows * _up(H, vector) * _up(F, vector)
    tails = [T * F * (H % vector), T * H * (F % vector), T * (F % (2.0 * vector))]
    return [np.ones_like(T), E, T * H * F, padded, E * H * F, T * H, T * F, *tails, *split]


def _attention(axes: Mapping[str, Floats], vector: float) -> list[Floats]:
    B, S, D, A = axes["batch"], axes["sequence"], axes["head_dim"], axes["heads"]
    # Queries in whole blocks of keys see the blocks up to their own; the rest see all keys.
    whole, rest = np.divmod(S, KEY_BLOCK)
    seen = whole * (whole + 1.0) / 2.0
    scores = B * A * (KEY_BLOCK**2 * seen + rest * S)
    score_flop = scores * D
    is_below = [limit > S for limit, _ in QUERY_BLOCKS]
    queries = np.select(is_below, [float(size) for _, size in QUERY_BLOCKS], QUERY_BLOCK)
    calls = B * A * (KEY_BLOCK / queries * seen + np.ceil(rest / queries) * (whole + 1.0))
    # Scores are kept in fp32 whatever the type.
    tails = B * A * rest * (S % (LINE_BYTES / ELEMENT_BYTES["fp32"]))
    askew = score_flop * ((S % vector != 0.0) | (D % vector != 0.0))
    shorter = [score_flop * (queries == size) for _, size in QUERY_BLOCKS]
    return [np.ones_like(B), calls, score_flop, scores, tails, B * A * S * D, askew, *shorter]


def _memory_bound(axes: Mapping[str, Floats], vector: float) -> list[Floats]:
    rows, width = axes["rows"], axes["width"]
    tails = [rows * (width % vector), rows * (width % (2.0 * vector))]
    return [np.ones_like(rows), rows * width, rows, *tails, rows * np.minimum(width, vector)]


def _kv_conversion(axes: Mapping[str, Floats], _vector: float) -> list[Floats]:
    T, senders, receivers = axes["tokens"], axes["tensor_from"], axes["tensor_to"]
    # A latent, which has one head, is written once for every rank that holds it.
    written = T * np.maximum(1.0, receivers / axes["heads"])
    tails = [written * (T % axes[page] != 0.0) for page in ("page_from", "page_to")]
    pages = [np.ceil(written / axes[page]) for page in ("page_from", "page_to")]
    return [np.ones_like(T), np.maximum(senders, receivers), written, *pages, *tails]


_DETAILED: Final[Mapping[str, Callable[[Mapping[str, Floats], float], list[Floats]]]] = {
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "attention": _attention,
    "memory_bound": _memory_bound,
    "kv_conversion": _kv_conversion,
}


def _named(operation: str, axes_NA: Floats) -> Mapping[str, Floats]:
    return {name: axes_NA[:, index] for index, name in enumerate(AXES[operation])}


def _block_rows(T: Floats, E: Floats, largest: Floats) -> tuple[Floats, Floats]:
    """Rows in whole blocks, and whether an expert is split, as too few rows fill its last block.

    Spread as profilers/kernels/grouped_gemm.py spreads T over experts; split is the last one or,
    before fewer rows than its own last block lacks, the first. A plan knows its loads no better
    than this, and rests of 1 to 15 rows cost about the same, so neither the rows beyond T nor H and
    F count for a split.
    """
    others = np.maximum(E - 1.0, 1.0)
    share, surplus = np.divmod(T - largest, others)
    rows = [largest, share, share + 1.0]
    blocks = [np.where(count <= ROW_BLOCK, count, _up(count, ROW_BLOCK)) for count in rows]
    total: Floats = blocks[0] + (others - surplus) * blocks[1] + surplus * blocks[2]
    is_split = (blocks[0] > T) | ((E > 1.0) & (blocks[1] > share))
    return total, is_split.astype(np.float64)


def _up(size: Floats, multiple: float) -> Floats:
    padded: Floats = np.ceil(size / multiple) * multiple
    return padded
