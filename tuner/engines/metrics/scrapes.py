"""Prometheus scrapes of a server: what its totals grew by, to check other logs with.

    mean TTFT = growth of ..._seconds_sum / growth of ..._seconds_count

A mean over a scrape tells nothing of the steps that made it, so nothing is fitted to scrapes.

Source: vllm/v1/metrics/loggers.py of vLLM 0.33.0; sglang/srt/observability/metrics_collector.py of
SGLang 0.5.23.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

_SAMPLE: Final = re.compile(r"(?P<name>[A-Za-z_:][\w:]*)(?P<labels>\{[^}]*\})?\s+(?P<value>\S+)")
_MODEL: Final = re.compile(r'model_name="([^"]*)"')
TTFT: Final = "time_to_first_token_seconds"
GAPS: Final = ("inter_token_latency_seconds", "time_per_output_token_seconds")
TOKENS: Final = "generation_tokens_total"
_WANTED: Final = tuple(
    f"{engine}:{name}"
    for engine in ("vllm", "sglang")
    for name in (
        *(f"{metric}_{part}" for metric in (TTFT, *GAPS) for part in ("sum", "count")),
        TOKENS,
    )
)


@dataclass(slots=True, kw_only=True)
class Scrapes:
    """Totals of the first and of the last scrape, by name and labels."""

    first: dict[str, float] = field(default_factory=dict)
    last: dict[str, float] = field(default_factory=dict)
    seen: int = 0
    """Times that the totals were read."""
    models: set[str] = field(default_factory=set)

    def read(self, lines: Iterable[str]) -> None:
        """Read one scrape or several.

        Raises:
            ValueError: a total falls, or there is none.
        """
        before = self.seen
        for line in lines:
            match = _SAMPLE.match(line)
            if match is None or match["name"] not in _WANTED:
                continue
            key, value = f"{match['name']}{match['labels'] or ''}", float(match["value"])
            if value < self.last.get(key, 0.0):
                raise ValueError(
                    f"{match['name']} falls from {self.last[key]:g} to {value:g}: the server was"
                    " started again between two scrapes; give those since"
                )
            self.first.setdefault(key, value)
            self.last[key] = value
            self.models.update(_MODEL.findall(match["labels"] or ""))
            self.seen += 1
        if self.seen == before:
            raise ValueError("no total of vLLM or SGLang is among these metrics")

    def growth(self, metric: str) -> float:
        """Return what all totals of a name grew by."""
        return sum(
            value - self.first[key]
            for key, value in self.last.items()
            if key.partition("{")[0].partition(":")[2] == metric
        )

    def mean_s(self, *metrics: str) -> float | None:
        """Return the mean of the first of these latencies that grew; None: of none."""
        for metric in metrics:
            if count := self.growth(f"{metric}_count"):
                return self.growth(f"{metric}_sum") / count
        return None
