"""Seconds of attention kernels of serving engines from a device's datasheet.

    prompts     14.4 us + 2 (pairs + 190 queries) heads (d_qk + d_v) / (r peak)
                + bytes / (0.64 bandwidth)
    sequences   11.5 us + (c^4 + m^4)^(1/4)

c are the operations of the new tokens at 0.9 of the peak, where the query rows of a key are padded
to 16, and m the bytes of the caches at the share of the bandwidth that the generation's kernels
reach. 190 keys more for every query are tiles beyond the diagonal and what a row of tiles begins
and ends with. The starts hold launch, prologue and, for sequences, parts of one past that are
joined again.

Shares of a peak are those of devices whose GEMMs sustain 0.7 of it; a device that states another
share (`reached_ratio`) reaches as much less here, and one with fewer matrix units than its
generation's others more.

Source:  aiconfigurator-core 0.12.0, 13 devices of NVIDIA, vLLM 0.24, SGLang 0.5.14 and TensorRT-LLM
         1.3.0rc20: `python tests/benchmarks/kernel_prices.py TABLES` prints the errors. Kernels of
         AMD and Huawei were not measured and count as Hopper's.

Letters: Q query points.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.devices.datasheet import Datasheet, Generation
from tuner.prices.ops import Op
from tuner.prices.rated_gemm import reached_flop_per_s
from tuner.prices.serve.curves import Floats
from tuner.prices.serve.work import work

PROMPT_S: Final = 14.4e-6
DECODE_S: Final = 11.5e-6
QUERY_KEYS: Final = 190.0
PROMPT_BYTES_RATIO: Final = 0.64
DECODE_PEAK_RATIO: Final = 0.9
QUERY_ROWS: Final = 16.0
EXPONENT: Final = 4.0
FP8_UNITS_RATIO: Final = 0.9
"""Bandwidth of fp8 caches over bf16's where the units multiply fp8."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRatios:
    """Shares of a generation's rates that attention kernels reach."""

    peak: float
    """Share of the bf16 peak, for prompts."""
    cache: float
    """Share of the bandwidth at which bf16 caches are read."""
    converted_cache: float
    """Share of the bandwidth at which fp8 caches are read that are converted to bf16."""


HOPPER: Final = AttentionRatios(peak=0.62, cache=0.82, converted_cache=0.48)
RATIOS: Final[Mapping[Generation, AttentionRatios]] = {
    Generation.AMPERE: AttentionRatios(peak=0.60, cache=0.52, converted_cache=0.40),
    Generation.ADA: AttentionRatios(peak=0.55, cache=0.85, converted_cache=0.82),
    Generation.HOPPER: HOPPER,
    Generation.BLACKWELL: AttentionRatios(peak=0.52, cache=0.90, converted_cache=0.79),
    Generation.BLACKWELL_RTX: AttentionRatios(peak=0.64, cache=0.96, converted_cache=0.96),
}


def rated_prompt_s(sheet: Datasheet, op: Op) -> Floats:
    """Price causal attention over whole prompts.

    Args:
        sheet: the device.
        op: `attention` or `latent_attention`.
    """
    flop_Q, bytes_Q = work(op)
    more_pairs_Q = 1.0 + 2.0 * QUERY_KEYS / np.maximum(op.axes["sequence"], 1.0)
    compute_Q = flop_Q * more_pairs_Q / reached_flop_per_s(sheet, "bf16", _ratios(sheet).peak)
    memory_Q = bytes_Q / (PROMPT_BYTES_RATIO * sheet.memory_bytes_per_s)
    return np.asarray(PROMPT_S + compute_Q + memory_Q)


def rated_decode_s(sheet: Datasheet, op: Op, *, has_fp8: bool, checked: int = 1) -> Floats:
    """Price attention of running sequences over their caches.

    Args:
        sheet: the device.
        op: `decode_attention` or `latent_decode` of one new token a sequence.
        has_fp8: whether the engine's kernels multiply fp8 caches as they are.
        checked: new tokens of a sequence; the past is read once for all of them.
    """
    ratios, flop_Q, bytes_Q = _ratios(sheet), *work(op)
    rows = float(op.axes["heads"]) / float(op.axes.get("kv_heads", 1.0))
    padded_rows = QUERY_ROWS * np.ceil(checked * rows / QUERY_ROWS)
    units, bandwidth = "bf16", ratios.cache
    if "kv_fp8" in op.kind and has_fp8 and "fp8" in sheet.flop_per_s:
        units, bandwidth = "fp8", FP8_UNITS_RATIO * ratios.cache
    elif "kv_fp8" in op.kind:
        bandwidth = ratios.converted_cache
    rate = reached_flop_per_s(sheet, units, DECODE_PEAK_RATIO)
    compute_Q = flop_Q * (padded_rows / rows) / rate
    memory_Q = bytes_Q / (bandwidth * sheet.memory_bytes_per_s)
    return np.asarray(DECODE_S + (compute_Q**EXPONENT + memory_Q**EXPONENT) ** (1.0 / EXPONENT))


def _ratios(sheet: Datasheet) -> AttentionRatios:
    return RATIOS.get(sheet.generation, HOPPER)
