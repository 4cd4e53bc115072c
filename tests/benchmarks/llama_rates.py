"""Compare predicted decode rates with published ones, each host left out in turn.

    python -m tests.benchmarks.llama_rates

Rows are those published with placement, bytes and the host's rated bandwidth; their sources are
named. Parameters are of public configs, bits per weight of the types that the files mix, both to
some percent. A second socket counts 0.6 of its bandwidth.
"""

import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from tests.benchmarks.bars import parse, say
from tuner.engines.llama_cpp.rates import DEVICE_SHARE, HOST_SHARE


class Reads(NamedTuple):
    """Billions of parameters that a token reads."""

    routed: float
    """Of routed experts."""
    rest: float
    """Of all else, the head too."""


MODELS: Final = {
    "Qwen3-30B-A3B": Reads(1.81, 1.22),
    "Qwen3.5-35B-A3B": Reads(1.01, 1.75),
    "DeepSeek-V3": Reads(20.43, 16.1),
    "DeepSeek-V3, 6 experts": Reads(15.32, 16.1),
    "Qwen3-Coder-Next": Reads(1.51, 1.5),
}
BITS: Final = {"Q8_0": (8.5, 8.5), "Q4_K_M": (4.85, 5.2), "UD-Q4_K_M": (4.85, 8.5)}
"""Bits of a weight of the experts, and of the rest."""


class Row(NamedTuple):
    """A published rate."""

    source: str
    host: str
    model: str
    quantization: str
    host_gb_per_s: float
    """Rated, with a second socket's at 0.6."""
    device_gb_per_s: float
    """Rated; 0: no device."""
    host_ratio: float
    """Share of the expert layers that are on the host."""
    tokens_per_s: float


_KT: Final = "ktransformers, doc/en/DeepseekR1_V3_tutorial.md @95009ea"
_QWEN: Final = "reddit.com 1rei65v"
ROWS: Final = (
    Row(_QWEN, "9950X", "Qwen3.5-35B-A3B", "Q8_0", 77, 960, 1, 35.7),
    Row(_QWEN, "9950X", "Qwen3.5-35B-A3B", "Q4_K_M", 77, 960, 1, 51.0),
    Row("llmfit PR 755", "10900X", "Qwen3-30B-A3B", "Q4_K_M", 102, 448, 0.75, 36.7),
    Row("ik_llama.cpp issue 2199", "9900T", "Qwen3.5-35B-A3B", "UD-Q4_K_M", 42.7, 192, 1, 26.15),
    Row(_KT, "6454S", "DeepSeek-V3", "Q4_K_M", 307, 1008, 1, 8.73),
    Row(_KT, "6454S", "DeepSeek-V3", "Q4_K_M", 491, 1008, 1, 12.208),
    Row(_KT, "6454S", "DeepSeek-V3", "Q4_K_M", 491, 1008, 1, 12.4),
    Row(_KT, "6454S", "DeepSeek-V3, 6 experts", "Q4_K_M", 491, 1008, 1, 13.69),
    Row("ktransformers, V3-success.md", "9654", "DeepSeek-V3", "Q4_K_M", 737, 864, 1, 10.8),
    Row("reddit, HX 370 under Ollama", "HX 370", "Qwen3-Coder-Next", "Q4_K_M", 89.6, 0, 1, 7.74),
    Row("ktransformers issue 806", "4x 8280", "DeepSeek-V3", "Q4_K_M", 430, 1008, 1, 4.03),
)
"""The last two are of hosts that ran far below what memory allows: a young architecture, threads on
half of the cores."""


def seconds(row: Row, *, host_share: float, device_share: float) -> float:
    """Return the predicted seconds of a token."""
    reads, (expert_bits, rest_bits) = MODELS[row.model], BITS[row.quantization]
    routed_bytes = reads.routed * expert_bits / 8
    host_bytes = row.host_ratio * routed_bytes
    device_bytes = (1 - row.host_ratio) * routed_bytes + reads.rest * rest_bits / 8
    if not row.device_gb_per_s:
        return (host_bytes + device_bytes) / (host_share * row.host_gb_per_s)
    return host_bytes / (host_share * row.host_gb_per_s) + device_bytes / (
        device_share * row.device_gb_per_s
    )


def error_ratio(row: Row, *, host_share: float, device_share: float) -> float:
    """Return the error of the predicted rate, relative to the published one."""
    predicted = 1 / seconds(row, host_share=host_share, device_share=device_share)
    return predicted / row.tokens_per_s - 1


def fitted(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the shares of host and device with the least mean error of the logarithm."""
    grid = [step / 100 for step in range(20, 91, 2)]

    def loss(shares: tuple[float, float]) -> float:
        return sum(
            abs(math.log1p(error_ratio(row, host_share=shares[0], device_share=shares[1])))
            for row in rows
        )

    return min(((host, device) for host in grid for device in grid), key=loss)


def left_out() -> Iterator[tuple[Row, float]]:
    """Yield each row with its error by shares that are fitted to the other hosts."""
    for host in dict.fromkeys(row.host for row in ROWS):
        host_share, device_share = fitted([row for row in ROWS if row.host != host])
        for row in ROWS:
            if row.host == host:
                yield row, error_ratio(row, host_share=host_share, device_share=device_share)


def p90(errors: Sequence[float]) -> float:
    """Return the error that nine of ten stay below."""
    ordered = sorted(errors)
    return ordered[min(math.ceil(0.9 * len(ordered)), len(ordered)) - 1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print errors by row, their median and their 90th percentile."""
    parse(__doc__, {}, arguments)
    rows = list(left_out())
    for row, error in rows:
        shipped = error_ratio(row, host_share=HOST_SHARE, device_share=DEVICE_SHARE)
        say(
            f"{row.host:8} {row.model:23} {row.quantization:9} {row.tokens_per_s:6.2f} tokens/s,"
            f" left out {error:+7.1%}, shipped shares {shipped:+7.1%}"
        )
    errors = [abs(error) for _, error in rows]
    say(
        f"{len(rows)} rows of {len({row.host for row, _ in rows})} hosts, each left out: median"
        f" {statistics.median(errors):.1%}, P90 {p90(errors):.1%}, worst {max(errors):.1%}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
