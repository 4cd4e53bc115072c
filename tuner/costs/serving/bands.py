"""How far measured latencies lie from predicted ones: a band that holds four launches of five.

Deciles of measured over predicted seconds of 1,795 published aggregated launches on Hopper and
Blackwell (database dump of InferenceX of April 2026 and an undocumented driver), predicted from
measured kernels without calibration. They tell what the model leaves out: releases,
speculative decoding that is not stated, and warm-up, which lengthens TTFT more than it shortens it.
How many launches of a table a band holds is said by `moetune backtest`.

Predictions from datasheets and of disaggregated launches are worse (H200 with vLLM: 22 % in the
median from the datasheet, 5 to 7 % from tables); nothing published covers them, and their band is
taken twice as wide in ratio on both sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from tuner.costs.serving.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Measured over predicted seconds: first and last decile."""

    low_ratio: float
    high_ratio: float

    def around(self, predicted_s: float) -> tuple[float, float]:
        """Within which a measured latency is expected, in seconds."""
        return self.low_ratio * predicted_s, self.high_ratio * predicted_s

    @property
    def doubled(self) -> "Band":
        """Twice as wide in ratio on both sides, for what no comparison covers."""
        return Band(low_ratio=self.low_ratio**2, high_ratio=self.high_ratio**2)


TPOT: Final[Mapping[Engine, Band]] = MappingProxyType(
    {
        Engine.VLLM: Band(low_ratio=0.88, high_ratio=1.14),
        Engine.SGLANG: Band(low_ratio=0.90, high_ratio=1.30),
        Engine.TRTLLM: Band(low_ratio=0.85, high_ratio=1.18),
    }
)
TTFT: Final[Mapping[Engine, Band]] = MappingProxyType(
    {
        Engine.VLLM: Band(low_ratio=0.88, high_ratio=1.52),
        Engine.SGLANG: Band(low_ratio=0.68, high_ratio=2.10),
        Engine.TRTLLM: Band(low_ratio=0.83, high_ratio=2.41),
    }
)


def bands_of(engine: Engine, *, is_compared: bool) -> tuple[Band, Band]:
    """Return the bands of TTFT and TPOT.

    Args:
        engine: that serves.
        is_compared: an aggregated launch from measured kernels, which published ones speak for.
    """
    ttft, tpot = TTFT[engine], TPOT[engine]
    return (ttft, tpot) if is_compared else (ttft.doubled, tpot.doubled)
