"""The figures of a prediction's JSON that are compared, goal by goal.

They are taken from the JSON and not from its type: another version of moetune writes fields that
this one may lack.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Unit = Literal["s", "bytes", "per_s", "money", "ratio"]
Json = Mapping[str, Any]
"""Object of a JSON file of any version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFigure:
    """A predicted number."""

    name: str
    value: float
    unit: Unit
    band: tuple[float, float] | None = None
    is_better_high: bool = False


def train_figures(predicted: Json) -> Iterator[StoredFigure]:
    """Yield the step time and the highest peak of a rank."""
    yield _banded(predicted, "step_time_s", unit="s")
    memory = [float(size) for size in predicted["peak_memory_bytes"]]
    bands = predicted.get("peak_memory_bytes_band") or [None] * len(memory)
    peak_rank = max(range(len(memory)), key=memory.__getitem__)
    yield StoredFigure(
        name="peak_memory_bytes",
        value=memory[peak_rank],
        unit="bytes",
        band=_band(bands[peak_rank]),
    )


def serve_figures(predicted: Json) -> Iterator[StoredFigure]:
    """Yield goodput, latencies, memory and cost."""
    yield StoredFigure(
        name="goodput_per_device",
        value=float(predicted["goodput_per_device"]),
        unit="per_s",
        is_better_high=True,
    )
    for name in ("ttft_s", "tpot_s"):
        mean = float(predicted[name]["mean"])
        yield StoredFigure(
            name=name, value=mean, unit="s", band=_band(predicted.get(f"{name}_band"))
        )
    memory = predicted.get("memory_bytes") or {}
    if memory:
        yield StoredFigure(name="memory_bytes", value=float(max(memory.values())), unit="bytes")
    if predicted.get("cost_per_hour") is not None:
        yield StoredFigure(
            name="cost_per_hour", value=float(predicted["cost_per_hour"]), unit="money"
        )


def place_figures(predicted: Json) -> Iterator[StoredFigure]:
    """Yield imbalance and time of the expert layers, by workload."""
    bands = predicted.get("imbalance_band") or {}
    for workload, value in predicted["imbalance"].items():
        yield StoredFigure(
            name=f"imbalance {workload}",
            value=float(value),
            unit="ratio",
            band=_band(bands.get(workload)),
        )
    for times in predicted.get("layer_times") or ():
        yield StoredFigure(
            name=f"expert layers {times['workload']}",
            value=float(times["after_s"]),
            unit="s",
            band=_band(times.get("after_s_band")),
        )


def _banded(predicted: Json, name: str, *, unit: Unit) -> StoredFigure:
    band = _band(predicted.get(f"{name}_band"))
    return StoredFigure(name=name, value=float(predicted[name]), unit=unit, band=band)


def _band(values: Any) -> tuple[float, float] | None:
    return (float(values[0]), float(values[1])) if values is not None else None
