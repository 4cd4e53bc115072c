"""Recorded routing: the expert loads of a model, layer by layer.

A JSON file:

    model, domain           optional texts
    num_logical_experts     experts of a layer, E
    top_k                   optional; experts that a token goes to
    layer_ids               absolute indices of the recorded layers, L of them, ascending
    logical_count           [L][E] token-expert pairs
    passes                  optional [P][L][E], the same pass by pass in order of time

Further keys (transitions and the like) are ignored here. Counts become shares of their layer, so
that recordings of different length are comparable.

Other files are recordings of `moetune profile` or dumps of an engine: profilers/routing reads them.
"""

import json
import math
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import Field

from profilers.errors import RecordingUnreadableError
from profilers.files import read_bounded
from profilers.records import Record
from tuner.errors import SpecError
from tuner.spec.files import read_json_object, shown_path, shown_value
from tuner.spec.goal import Phase

JSON: Final = ".json"
LARGEST_RECORD_BYTES: Final = 64_000_000
MOST_EXPERTS: Final = 100_000

Ratio = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
LoadRatios = tuple[tuple[Ratio, ...], ...]
"""[recorded layers][experts]; each row sums to 1."""


class RoutingRecord(Record):
    """Shares of a layer's token copies by expert."""

    name: str
    """Model and domain as the file states them, or the file's name."""
    num_experts: Annotated[int, Field(ge=1)]
    top_k: Annotated[int, Field(ge=1)] | None = None
    layer_ids: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    """Absolute layer indices, ascending; not every MoE layer need be recorded."""
    load_ratios: LoadRatios
    """Over the whole recording."""
    passes: tuple[LoadRatios, ...] = ()
    """Pass by pass in order of time; empty if the file has totals only."""

    def of_phase(self, phase: Phase) -> LoadRatios:
        """Mean shares over the passes of a phase; the whole recording if it has no passes."""
        if not self.passes:
            return self.load_ratios
        if phase is Phase.EARLY:
            chosen = self.passes[: max(1, len(self.passes) // 4)]
        else:
            chosen = self.passes[len(self.passes) // 2 :]
        return tuple(
            tuple(sum(shares) / len(chosen) for shares in zip(*rows, strict=True))
            for rows in zip(*chosen, strict=True)
        )


def read_routing(path: Path) -> RoutingRecord:
    """Read a recorded routing.

    Raises:
        SpecError: one line that names the file, the field, its value and the rule.
    """
    if path.suffix != JSON:
        return _parse_record(_record_values(path), shown_path(path), name=path.stem)
    source = shown_path(path)
    values = read_json_object(path, what="routing record", most_bytes=LARGEST_RECORD_BYTES)
    return _parse_record(values, source, name=path.stem)


def routing_json(path: Path) -> bytes:
    """Return the recording in the layout above, for a plan that stores its inputs.

    Raises:
        SpecError: it cannot be read.
    """
    if path.suffix != JSON:
        return json.dumps(_record_values(path)).encode()
    return read_bounded(path, most_bytes=LARGEST_RECORD_BYTES)


def _record_values(path: Path) -> dict[str, Any]:
    """Return a stored recording or an engine's dump in the layout above."""
    from profilers.routing.store import read_recording

    try:
        recording = read_recording(path)
    except RecordingUnreadableError as error:
        raise SpecError(f"goal.routing.path: {error}") from error
    several = recording.num_passes > 1
    return {
        "model": recording.model,
        "domain": recording.workload,
        "num_logical_experts": recording.num_experts,
        "top_k": recording.top_k,
        "layer_ids": list(recording.layer_ids),
        "logical_count": recording.count_LE.tolist(),
        # A pass without tokens in a layer has no shares.
        "passes": [
            rows.tolist() for rows in recording.count_PLE if several and rows.any(axis=1).all()
        ],
    }


def _parse_record(values: dict[str, Any], source: str, *, name: str) -> RoutingRecord:
    num_experts = _count(values, "num_logical_experts", source)
    layer_ids = _layer_ids(values, source)
    shape = (len(layer_ids), num_experts)
    passes = values.get("passes") or []
    if not isinstance(passes, list):
        raise SpecError(f"{source}: passes: {shown_value(passes)} is not a list")
    label = " ".join(str(values[key]) for key in ("model", "domain") if values.get(key))
    return RoutingRecord(
        name=label or name,
        num_experts=num_experts,
        top_k=_count(values, "top_k", source) if values.get("top_k") is not None else None,
        layer_ids=layer_ids,
        load_ratios=_ratios(values.get("logical_count"), f"{source}: logical_count", shape=shape),
        passes=tuple(
            _ratios(counts, f"{source}: passes[{index}]", shape=shape)
            for index, counts in enumerate(passes)
        ),
    )


def _count(values: dict[str, Any], name: str, source: str) -> int:
    value = values.get(name)
    if value is None:
        raise SpecError(f"{source}: {name}: missing")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_EXPERTS:
        raise SpecError(
            f"{source}: {name}: {shown_value(value)} is not a whole number in 1..{MOST_EXPERTS}"
        )
    return value


def _layer_ids(values: dict[str, Any], source: str) -> tuple[int, ...]:
    ids = values.get("layer_ids")
    if not isinstance(ids, list) or not ids:
        raise SpecError(f"{source}: layer_ids: {shown_value(ids)} is not a list of layers")
    for position, layer in enumerate(ids):
        if isinstance(layer, bool) or not isinstance(layer, int) or layer < 0:
            raise SpecError(
                f"{source}: layer_ids[{position}]: {shown_value(layer)} is not a layer index"
            )
        if position and layer <= ids[position - 1]:
            raise SpecError(
                f"{source}: layer_ids[{position}]: {layer} after {ids[position - 1]};"
                " layers must ascend"
            )
    return tuple(ids)


def _ratios(counts: Any, where: str, *, shape: tuple[int, int]) -> LoadRatios:
    num_layers, num_experts = shape
    if not isinstance(counts, list) or len(counts) != num_layers:
        raise SpecError(f"{where}: {shown_value(counts)}, expected {num_layers} rows of layers")
    return tuple(
        _row_ratios(row, f"{where}[{index}]", num_experts=num_experts)
        for index, row in enumerate(counts)
    )


def _row_ratios(row: Any, where: str, *, num_experts: int) -> tuple[float, ...]:
    if not isinstance(row, list) or len(row) != num_experts:
        raise SpecError(f"{where}: {shown_value(row)}, expected {num_experts} counts")
    for expert, count in enumerate(row):
        if isinstance(count, bool) or not isinstance(count, int | float):
            raise SpecError(f"{where}[{expert}]: {shown_value(count)} is not a number")
        if not 0 <= count <= 1e18:
            raise SpecError(f"{where}[{expert}]: {shown_value(count)} is not in 0..1e18")
    total = math.fsum(row)
    if total == 0:
        raise SpecError(f"{where}: every count is zero, so the layer was never recorded")
    return tuple(min(1.0, count / total) for count in row)
