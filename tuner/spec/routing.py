"""Recorded routing: the expert loads of a model, layer by layer, as shares of each layer.

Any recording that profilers/routing reads: JSON (profilers/routing/plain_json.py has its layout; of
one with passes, their sum), what `moetune profile` stores, or an engine's dump. Shares make
recordings of different length comparable; transitions and sampled tokens are not used here.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from pydantic import Field

from profilers.errors import RecordingUnreadableError
from profilers.files import read_bounded
from profilers.records import Record
from profilers.routing.contents import MOST_JSON_BYTES
from tuner.errors import SpecError
from tuner.spec.goal import Phase

if TYPE_CHECKING:
    from profilers.routing.recording import Counts, Recording

JSON: Final = ".json"

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
    """Loads over the whole recording."""
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
    recording = _recording(path)
    label = f"{recording.model} {recording.workload}".strip()
    # A pass without tokens in a layer has no shares.
    passes = [rows for rows in recording.count_PLE if rows.any(axis=1).all()]
    return RoutingRecord(
        name=label or path.stem,
        num_experts=recording.num_experts,
        top_k=recording.top_k,
        layer_ids=recording.layer_ids,
        load_ratios=_ratios(recording.count_LE),
        passes=tuple(map(_ratios, passes)) if recording.num_passes > 1 else (),
    )


def routing_json(path: Path) -> bytes:
    """Return the recording as JSON, for a plan that stores its inputs.

    Raises:
        SpecError: it cannot be read.
    """
    if path.suffix == JSON:
        return read_bounded(path, most_bytes=MOST_JSON_BYTES)
    recording = _recording(path)
    several = recording.num_passes > 1
    values = {
        "model": recording.model,
        "domain": recording.workload,
        "num_logical_experts": recording.num_experts,
        "top_k": recording.top_k,
        "layer_ids": recording.layer_ids,
        "logical_count": recording.count_LE.tolist(),
        "passes": recording.count_PLE.tolist() if several else [],
    }
    return json.dumps(values).encode()


def _recording(path: Path) -> "Recording":
    from profilers.routing.store import read_recording

    try:
        return read_recording(path)
    except RecordingUnreadableError as error:
        raise SpecError(f"goal.routing.path: {error}") from error


def _ratios(count_LE: "Counts") -> LoadRatios:
    ratio_LE = count_LE / count_LE.sum(axis=1, keepdims=True)
    return tuple(tuple(row) for row in ratio_LE.tolist())
