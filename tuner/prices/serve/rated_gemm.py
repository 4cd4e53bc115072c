"""Seconds of a GEMM [m, k] x [k, n] of a serving engine from a device's datasheet.

    2.1 us + q + (c^4 + b^4)^(1/4)
    c    waves * units * 2 tile (k / p + k0) / (r peak * derate(tile)), over the best of tiles and
         of p = 1 to 16 parts of k
    b    bytes at 0.77 of the bandwidth

Tiles and waves are those of training (tuner/prices/datasheet.py); narrower tiles serve steps
of few tokens, and k is cut into parts where tiles are fewer than compute units. k0 is prologue and
epilogue of a tile in elements of k. q is the kernel that quantises the rows where their scales are
those of blocks. Without units for a format, kernels unpack its weights to bf16 as they read them,
which takes the time of b.

r stands for the largest tile at full waves, on devices of which GEMMs of a model sustain about 0.7;
one that states another share (`reached_ratio`) has as much more or less. AMD counts as Hopper.

Source:  GEMMs of aiconfigurator-core 0.12.0, 13 devices of NVIDIA, three engines, without tables
         whose timing holds more than the kernel (`EngineTraits.spoilt_gemms`): `python
         tests/benchmarks/kernel_prices.py TABLES` prints the errors. Other vendors' were not
         measured; Ascend's 0.7 is a guess.

Letters: Q query points; C choices of a tile and a number of parts.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from tuner.devices.datasheet import Datasheet, Generation
from tuner.prices.datasheet import TILES, reached_flop_per_s, reached_share
from tuner.prices.ops import Op
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.work import work

START_S: Final = 2.1e-6
EXTRA_DEPTH: Final = 155.0
BYTES_RATIO: Final = 0.77
EXPONENT: Final = 4.0
PARTS: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
NARROW_TILES: Final = ((32.0, 128.0, 0.55), (16.0, 128.0, 0.40))
CHOICES: Final = np.array(
    [(*tile, parts) for tile in (*TILES, *NARROW_TILES) for parts in PARTS]
).T[:, :, None]
"""Rows, columns and derate of a tile, and parts of k: one column of each of the four a choice."""
QUANTISED_APART: Final = frozenset({"fp8_block", "nvfp4"})
"""Formats whose scales of blocks a kernel of its own computes; rows with one scale are quantised by
the kernel before."""
QUANTISE_S: Final[Mapping[Generation, float]] = {
    Generation.HOPPER: 2.7e-6,
    Generation.ADA: 2.7e-6,
    Generation.BLACKWELL: 4.7e-6,
    Generation.BLACKWELL_RTX: 2.7e-6,
}
UNPACK_S: Final = 27e-12
"""Seconds in which one compute unit unpacks a weight: on the 108 of A100 TensorRT-LLM's GEMMs of
int4 weights take 0.25 ps a weight longer than their bytes from 16 to 128 tokens, int8 0.14 to 0.3
(aiconfigurator-core 0.12.0, 2,048 and more columns)."""

RATIOS: Final[Mapping[Generation, Mapping[str, float]]] = {
    Generation.AMPERE: {"bf16": 0.88},
    Generation.ADA: {"bf16": 0.70, "fp8": 0.50, "fp8_block": 0.34},
    Generation.HOPPER: {"bf16": 0.93, "fp8": 0.62, "fp8_block": 0.62},
    Generation.BLACKWELL: {"bf16": 0.83, "fp8": 0.54, "fp8_block": 0.75, "nvfp4": 0.45},
    Generation.ASCEND: {"bf16": 0.7},
    Generation.BLACKWELL_RTX: {"bf16": 0.92, "fp8": 0.76, "fp8_block": 0.47, "nvfp4": 0.68},
}
"""Share of the peak by number format; what is left out counts as bf16."""


def rated_gemm_s(sheet: Datasheet, op: Op, *, units: str) -> Floats:
    """Price a GEMM.

    Args:
        sheet: the device.
        op: `gemm`.
        units: the format that the device multiplies, a key of `flop_per_s`.
    """
    m_Q, n, k = np.asarray(op.axes["m"], dtype=np.float64), op.axes["n"], op.axes["k"]
    _, bytes_Q = work(op)
    ratios = RATIOS.get(sheet.generation, RATIOS[Generation.HOPPER])
    ratio = ratios.get("bf16" if units == "bf16" else op.dtype, ratios["bf16"])
    rate = reached_flop_per_s(sheet, units, ratio)
    compute_Q = _depths(sheet, m_Q, float(n), float(k), units=units) / rate
    memory_Q = bytes_Q / (BYTES_RATIO * sheet.memory_bytes_per_s)
    start_s = START_S
    if op.dtype in QUANTISED_APART and units != "bf16":
        start_s += QUANTISE_S.get(sheet.generation, QUANTISE_S[Generation.HOPPER])
    if units == "bf16" != op.dtype:
        memory_Q = memory_Q + UNPACK_S * float(n) * float(k) / sheet.compute_units
    return np.asarray(start_s + (compute_Q**EXPONENT + memory_Q**EXPONENT) ** (1.0 / EXPONENT))


def _depths(sheet: Datasheet, m_Q: Floats, n: float, k: float, *, units: str) -> Floats:
    """Operations of whole waves, over the best tile and number of parts of k."""
    extra = EXTRA_DEPTH * sheet.matrix_ratio * sheet.flop_per_s[units] / sheet.flop_per_s["bf16"]
    rows_C, columns_C, derate_C, parts_C = CHOICES
    per_row_C = np.ceil(n / columns_C) * parts_C / sheet.compute_units
    reached_C = reached_share(derate_C, sheet.matrix_ratio)
    depth_C = rows_C * columns_C / reached_C * (k / parts_C + extra)
    full_CQ = np.maximum(np.ceil(m_Q.ravel() / rows_C) * per_row_C, 1.0)
    least_Q = (0.5 * (full_CQ + np.ceil(full_CQ)) * depth_C).min(axis=0)
    return np.asarray(2.0 * sheet.compute_units * least_Q.reshape(m_Q.shape))
