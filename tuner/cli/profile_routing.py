"""Routing recordings on the command line: import, show."""

import json
import re
from pathlib import Path
from typing import Any, Final

from tuner.cli.text import print_exact, print_text
from tuner.errors import TunerError

MOST_LAYERS: Final = 10_000


def import_recording(kind: str, path: Path | None, out: Path, **stated: Any) -> None:
    """Read a dump into a stored recording; `stated` goes before what the dump says."""
    from datetime import UTC, datetime

    from profilers.imports.registry import ROUTING
    from profilers.routing.formats import read_as, recognised
    from profilers.routing.store import write_recording

    if path is None:
        raise TunerError(
            f"{kind} needs the path of a recording: moetune profile import {kind} PATH"
        )
    kind = recognised(path) if kind == ROUTING else kind
    recording = read_as(kind, path, **stated)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    write_recording(out, recording, origin=f"imported as {kind}", created=created)


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
    from profilers.routing.store import read, read_header

    recording = read(path)
    return {
        **read_header(path).model_dump(mode="json"),
        "token_copies": int(recording.count_PLE.sum()),
        "skew": skew(recording).model_dump(mode="json"),
    }


def print_recording(path: Path, *, as_object: bool) -> None:
    """Print a stored recording, for people with the skew of its layers."""
    facts = as_json(path)
    if as_object:
        print_exact(json.dumps(facts, indent=2))
        return
    skews = facts["skew"]
    named = " ".join(part for part in (facts["model"], facts["workload"]) if part) or "routing"
    kept = {
        f"transitions ({facts['transitions']})": facts["transitions"],
        "sampled tokens": facts["sampled_tokens"],
    }
    lines = (
        f"{named}: {len(facts['layer_ids'])} MoE layers x {facts['num_experts']} experts, top"
        f" {facts['top_k'] or '?'}, {facts['passes']} passes, {facts['token_copies']} token copies",
        " ".join(part for part in (facts["origin"], facts["created"]) if part),
        f"most-loaded expert over mean: {skews['median']:.2f} in the median layer,"
        f" {skews['worst']:.2f} in the worst; per pass {skews['pass_median']:.2f}, P99"
        f" {skews['pass_p99']:.2f}",
        f"also kept: {', '.join(name for name, value in kept.items() if value) or 'nothing'}",
    )
    print_text("\n".join(line for line in lines if line))
