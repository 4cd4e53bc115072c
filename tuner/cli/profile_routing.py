"""Routing recordings on the command line: import, show."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from tuner.cli.text import columns, print_exact, print_text
from tuner.errors import TunerError

if TYPE_CHECKING:
    from profilers.routing.overrides import Naming
    from profilers.routing.recording import Recording

MOST_LAYERS: Final = 10_000


def import_recording(kind: str, path: Path | None, out: Path, *, naming: "Naming") -> Path:
    """Read a dump into a stored recording; its folder.

    If `out` is a profile already, the recording is stored with its tables.
    """
    from datetime import UTC, datetime

    from profilers.imports.registry import ROUTING
    from profilers.routing.formats import read_as, recognised
    from profilers.routing.store import (
        FOLDER,
        WORKLOAD,
        holds_recording,
        read_recording,
        stored_below,
        write_recording,
    )
    from profilers.store import holds_profile

    if path is None:
        raise TunerError(
            f"{kind} needs the path of a recording: moetune profile import {kind} PATH"
        )
    if kind == ROUTING and not (holds_recording(path) or stored_below(path)):
        kind = recognised(path)
    is_stored = kind == ROUTING
    recording = (
        read_recording(path, naming=naming) if is_stored else read_as(kind, path, naming=naming)
    )
    target = out
    if holds_profile(out):
        if WORKLOAD.fullmatch(recording.workload) is None:
            raise TunerError(f"workload {recording.workload!r} is no folder name; give --workload")
        target = out / FOLDER / recording.workload
    created = datetime.now(UTC).isoformat(timespec="seconds")
    write_recording(target, recording, origin=f"imported as {kind}", created=created)
    return target


def layer_ids(text: str) -> tuple[int, ...]:
    """Read `3-60` or `0,7,15`."""
    ids: list[int] = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*(\d{1,5})(?:\s*-\s*(\d{1,5}))?\s*", part, re.ASCII)
        if match is None or int(match.group(2) or match.group(1)) >= MOST_LAYERS:
            raise TunerError(f"--layer-ids: {part[:40]!r} is no layer, nor a range such as 3-60")
        ids += range(int(match.group(1)), int(match.group(2) or match.group(1)) + 1)
    return tuple(ids)


def as_json(path: Path) -> dict[str, Any]:
    """Header and skew of a stored recording."""
    from profilers.routing.skew import skew
    from profilers.routing.store import read_header, read_stored

    recording = read_stored(path)
    return {
        **read_header(path).model_dump(mode="json"),
        "token_copies": int(recording.count_PLE.sum()),
        "skew": skew(recording).model_dump(mode="json"),
    }


def text(path: Path) -> str:
    """Format a recording for people, with the skew of every layer."""
    from profilers.routing.store import read_stored

    recording, facts = read_stored(path), as_json(path)
    skews = facts["skew"]
    named = " ".join(part for part in (facts["model"], facts["workload"]) if part) or "routing"
    size = (
        f"{len(facts['layer_ids'])} MoE layers x {facts['num_experts']} experts, top"
        f" {facts['top_k'] or '?'}, {facts['passes']} passes, {facts['token_copies']} token copies"
    )
    lines = [
        f"{named}: {size}",
        " ".join(part for part in (facts["origin"], facts["created"]) if part),
        f"most-loaded expert over mean: {skews['median']:.2f} in the median layer,"
        f" {skews['worst']:.2f} in the worst; per pass {skews['pass_median']:.2f}, P99"
        f" {skews['pass_p99']:.2f}",
        f"also kept: {_kept(recording)}",
    ]
    return "\n".join(line for line in lines if line)


def listed(paths: Sequence[Path]) -> str:
    """The recordings of a profile, a line each."""
    rows = []
    for path in paths:
        facts = as_json(path)
        rows.append(
            (
                f"{path.parent.name}/{path.name}",
                facts["model"],
                len(facts["layer_ids"]),
                facts["num_experts"],
                facts["top_k"] or "?",
                facts["passes"],
                f"{facts['skew']['median']:.2f}",
            )
        )
    header = ("recording", "model", "layers", "experts", "top", "passes", "max/mean")
    return columns(rows, header=header)


def _kept(recording: "Recording") -> str:
    kept = {
        f"transitions ({recording.transition_kind})": recording.transition_MEE,
        "sampled tokens": recording.token_LTK,
    }
    return ", ".join(name for name, array in kept.items() if array is not None) or "nothing"


def print_recording(path: Path, *, as_object: bool) -> None:
    """Print a stored recording."""
    if as_object:
        print_exact(json.dumps(as_json(path), indent=2))
    else:
        print_text(text(path))
