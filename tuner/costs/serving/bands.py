"""How far measured latencies lie from predicted ones: a band that holds four launches of five.

First and last decile of measured over predicted seconds of 1,764 aggregated and 178 disaggregated
published launches on Hopper and Blackwell whose instances and degrees are known (database dump of
InferenceX of April 2026 and an undocumented driver), without calibration: predicted from measured
kernels, and once more with every kernel table left out, from the datasheet alone. Printed by

    python tests/benchmarks/serving_bands.py RUNS.csv [TABLES]

They tell what the model leaves out: releases, drafting that is not stated, queues at an
overrun prefill side, and warm-up, which lengthens TTFT more than it shortens it. An engine with
fewer than 30 launches of a kind (vLLM, disaggregated) takes the deciles of all engines.

Predictions from datasheets are too short in the median (TTFT by a quarter, disaggregated by half);
they are not corrected, so that their bands reach far above and are widened to hold the prediction
itself.

Nothing published covers other modes. Offloaded prompts pass prefill and decode instances: the band
of disaggregated launches is the nearest. Requests whose experts stand apart in decode have that one
twice as wide in ratio on both sides, shared devices that of aggregated ones likewise. All are
guesses.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tuner.costs.serving.engine import Engine
from tuner.spec.serving.goal import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Measured over predicted seconds: first and last decile."""

    low_ratio: float
    high_ratio: float

    def around(self, predicted_s: float) -> tuple[float, float]:
        """Within which a measured latency is expected, in seconds; the prediction lies inside."""
        low, high = min(self.low_ratio, 1.0), max(self.high_ratio, 1.0)
        return low * predicted_s, high * predicted_s

    @property
    def doubled(self) -> "Band":
        """Twice as wide in ratio on both sides, for what no comparison covers."""
        return Band(low_ratio=self.low_ratio**2, high_ratio=self.high_ratio**2)


Bands = Mapping[Engine, Band]


def _bands(**by_engine: tuple[float, float]) -> Bands:
    return MappingProxyType(
        {
            Engine(name): Band(low_ratio=low, high_ratio=high)
            for name, (low, high) in by_engine.items()
        }
    )


TTFT: Final = _bands(vllm=(0.88, 1.53), sglang=(0.68, 2.18), trtllm=(0.84, 2.41))
TPOT: Final = _bands(vllm=(0.88, 1.15), sglang=(0.90, 1.31), trtllm=(0.87, 1.18))
"""Aggregated, from kernels: 764, 429 and 571 launches."""

APART_TTFT: Final = _bands(vllm=(0.71, 9.84), sglang=(0.59, 3.81), trtllm=(0.90, 17.6))
APART_TPOT: Final = _bands(vllm=(0.73, 1.22), sglang=(0.66, 1.17), trtllm=(0.79, 1.25))
"""Disaggregated, from kernels: all 178, of them 62 and 111 launches."""

SHEET_TTFT: Final = _bands(vllm=(0.96, 2.34), sglang=(0.80, 3.10), trtllm=(0.94, 2.75))
SHEET_TPOT: Final = _bands(vllm=(0.96, 1.41), sglang=(0.93, 1.64), trtllm=(0.90, 1.37))
"""Aggregated, from the datasheet."""

SHEET_APART_TTFT: Final = _bands(vllm=(1.34, 15.4), sglang=(1.31, 11.6), trtllm=(1.37, 23.3))
SHEET_APART_TPOT: Final = _bands(vllm=(0.87, 1.45), sglang=(0.89, 1.42), trtllm=(0.86, 1.47))
"""Disaggregated, from the datasheet."""


def bands_of(engine: Engine, *, mode: Mode, has_kernels: bool) -> tuple[Band, Band]:
    """Return the bands of TTFT and TPOT.

    Args:
        engine: that serves.
        mode: of the deployment.
        has_kernels: every operation was priced from measured kernels.
    """
    found = (TTFT, TPOT) if has_kernels else (SHEET_TTFT, SHEET_TPOT)
    if mode in ("disaggregated", "prefill_offload", "attention_expert"):
        found = (APART_TTFT, APART_TPOT) if has_kernels else (SHEET_APART_TTFT, SHEET_APART_TPOT)
    ttft, tpot = found[0][engine], found[1][engine]
    is_guess = mode in ("shared_device", "attention_expert")
    return (ttft.doubled, tpot.doubled) if is_guess else (ttft, tpot)
