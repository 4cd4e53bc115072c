"""Seconds of a layer's routed experts on one rank from a device's datasheet.

    29.5 us + 2 W (i C + 10 E) / (r peak) + (w W E + 6 i C (h + f) + 25 M h) / bandwidth

W are the weights of one expert and w their bytes, C the copies of tokens that the rank computes, E
the distinct experts that it reads, M the tokens that reach it, h and f hidden and expert width. A
read expert's rows are padded, as if it had ten more; the bytes of a copy are written and read
around its GEMMs; the bytes of a token are routing, sorting, quantising and summing, which kernels
do for the tokens of every rank unless copies are dispatched. i is the most-loaded rank's share over
the mean for unequal loads: R ranks of E experts have 1 + 0.8 sqrt(2 ln R R / E). The start holds
sorting, two grouped GEMMs, what lies between them, and the sum.

Source:  experts of aiconfigurator-core 0.12.0 at its power law of loads, 13 devices of NVIDIA,
         vLLM 0.24, SGLang 0.5.14, TensorRT-LLM 1.3.0rc20 (`python tests/benchmarks/
         kernel_prices.py TABLES`). r is that of more than 128 rows an expert. AMD and Ascend count
         as Hopper.

Letters: Q query points.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np

from tuner.catalog.serve_rules.traits import ExpertKernels
from tuner.devices.datasheet import Datasheet, Generation
from tuner.prices.ops import Op
from tuner.prices.rated_gemm import reached_flop_per_s
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.work import BYTES

START_S: Final = 29.5e-6
EXTRA_ROWS: Final = 10.0
COPY_BYTES: Final = 6.0
TOKEN_BYTES: Final = 25.0
IMBALANCE: Final = 0.8

RATIOS: Final[Mapping[Generation, Mapping[str, float]]] = {
    Generation.AMPERE: {"bf16": 0.36, "int4_wo": 0.24, "mxfp4": 0.30},
    Generation.ADA: {"bf16": 0.74, "fp8": 0.9, "fp8_block": 0.9, "int4_wo": 0.45, "mxfp4": 0.62},
    Generation.HOPPER: {
        "bf16": 0.38,
        "fp8": 0.34,
        "fp8_block": 0.34,
        "int4_wo": 0.22,
        "mxfp4": 0.30,
    },
    Generation.BLACKWELL: {
        "bf16": 0.64,
        "fp8": 0.9,
        "fp8_block": 0.25,
        "int4_wo": 0.16,
        "mxfp4": 0.25,
        "nvfp4": 0.9,
    },
    Generation.BLACKWELL_RTX: {
        "bf16": 0.9,
        "fp8": 0.9,
        "fp8_block": 0.54,
        "int4_wo": 0.52,
        "mxfp4": 0.44,
        "nvfp4": 0.9,
    },
}
"""Share of the peak by number format, of bf16's where weights are unpacked. What is left out counts
as int4 where it is unpacked, as fp8 where a device multiplies it, and as bf16 else."""

GENERATED_START_S: Final = {"fp8": 23e-6, "fp8_block": 23e-6}
USUAL_GENERATED_START_S: Final = 19e-6
PORTABLE_START_S: Final = 38e-6
PORTABLE_RATIOS: Final = {"bf16": 0.2, "fp8": 0.17, "fp8_block": 0.1, "int4_wo": 0.1}
"""Kernels that Blackwell has a choice of (`ExpertKernels` of traits.py): the start of those that
TensorRT-LLM generates, longer where rows are quantised to fp8 first; start and shares of Triton's
and Marlin's. Source: there, rows of vLLM 0.22 and 0.24 and of SGLang 0.5.14 by `kernel_source`."""


def rated_experts_s(
    sheet: Datasheet,
    op: Op,
    *,
    reached_Q: Floats,
    units: str,
    is_uneven: bool,
    bandwidth_ratio: float = 1.0,
) -> Floats:
    """Price the experts of a rank.

    Args:
        sheet: the device.
        op: `moe`; `handled` are the tokens that reach the rank, where not `tokens`.
        reached_Q: distinct experts that it reads.
        units: the format that the device multiplies, a key of `flop_per_s`.
        is_uneven: whether `tokens` are those of the mean rank, of which one has more.
        bandwidth_ratio: share of the bandwidth at which weights are read.
    """
    axes, tokens_Q = op.axes, np.asarray(op.axes["tokens"], dtype=np.float64)
    ranks, ffn = float(axes["expert"]), axes["ffn"] / axes["tensor"]
    weights = axes.get("matrices", 3.0) * axes["hidden"] * ffn
    copies_Q = tokens_Q * axes["top_k"] / ranks
    if is_uneven:
        copies_Q = copies_Q * (
            1.0 + IMBALANCE * np.sqrt(2.0 * np.log(ranks) * ranks / axes["experts"])
        )
    ratios = RATIOS.get(sheet.generation, RATIOS[Generation.HOPPER])
    like = "fp8" if units != "bf16" else "bf16" if op.dtype == "bf16" else "int4_wo"
    ratio, start_s = ratios.get(op.dtype, ratios.get(like, ratios["bf16"])), START_S
    if ExpertKernels.GENERATED in axes:
        start_s = GENERATED_START_S.get(op.dtype, USUAL_GENERATED_START_S)
    if ExpertKernels.PORTABLE in axes:
        ratio, start_s = PORTABLE_RATIOS[op.dtype], PORTABLE_START_S
    rate = reached_flop_per_s(sheet, units, ratio)
    # What a read expert costs beside its bytes depends on no device's number of matrix units.
    flop_Q = 2.0 * weights * (copies_Q + EXTRA_ROWS * sheet.matrix_ratio * reached_Q)
    bytes_Q = BYTES[op.dtype] * weights * reached_Q / bandwidth_ratio
    bytes_Q = bytes_Q + COPY_BYTES * copies_Q * (axes["hidden"] + ffn)
    if "/" not in op.kind:
        bytes_Q = bytes_Q + TOKEN_BYTES * axes.get("handled", tokens_Q) * axes["hidden"]
    return np.asarray(start_s + flop_Q / rate + bytes_Q / sheet.memory_bytes_per_s)
