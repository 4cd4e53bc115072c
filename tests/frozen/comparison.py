"""What is recorded in `data/`, and where an answer differs from it.

A file holds the tree of one case (see `columns.py`) as compressed JSON, which keeps every bit of a
number. Numbers agree within 1e-12 of themselves. A difference of large terms (a bubble, a gap) may
also be off by 1e-12 of what it was taken from: seconds of the step that they are a part of, bytes
of the peak, ratios of one. Everything else agrees to the letter, lines of launch files too.
"""

import gzip
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

Tree = Any

DATA: Final = Path(__file__).with_name("data")
TOLERANCE: Final = 1e-12
STEPS: Final = ("step_time_s", "step_s")
PEAKS: Final = ("peak_memory_bytes", "peak_bytes", "memory_bytes")
RATIOS: Final = ("_ratio", "_probability")
NAMING: Final = 160
"""Characters of a row or a line that are shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One place where an answer is another than the recorded one."""

    case: str
    where: str
    recorded: Any
    now: Any
    ratio: float | None
    """By how much a number differs, as a share of the recorded one; None: words or structure."""

    def __str__(self) -> str:
        more = "" if self.ratio is None else f" ({self.ratio:+.3g} of it)"
        return (
            f"{self.case}: {self.where}: recorded {_shown(self.recorded)},"
            f" now {_shown(self.now)}{more}"
        )


def read(case: str) -> Tree | None:
    """Return what is recorded of a case; None where nothing is."""
    path = _path(case)
    if not path.is_file():
        return None
    return json.loads(gzip.decompress(path.read_bytes()))


def write(case: str, tree: Tree) -> None:
    """Record a case; equal trees make equal files."""
    text = json.dumps(tree, separators=(",", ":"), ensure_ascii=False)
    DATA.mkdir(exist_ok=True)
    _path(case).write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def recorded() -> tuple[str, ...]:
    """Cases of which something is recorded."""
    return tuple(sorted(path.name.removesuffix(".json.gz") for path in DATA.glob("*.json.gz")))


def rows_of(table: Tree) -> list[dict[str, Any]]:
    """Return the drawn rows of a table."""
    drawn = table["drawn"]
    return [dict(zip(drawn, values, strict=True)) for values in zip(*drawn.values(), strict=True)]


def sampled(table: Tree, count: int) -> Tree:
    """Keep so many rows, spread evenly."""
    total = len(next(iter(table["figures"].values())))
    kept = sorted({number * total // count for number in range(count)})
    return {
        part: {name: [values[at] for at in kept] for name, values in table[part].items()}
        for part in ("drawn", "figures")
    }


def differences(case: str, old: Tree, new: Tree) -> list[Difference]:
    """List where two trees of a case differ, as read from JSON or not."""
    return list(_compared(case, "", old, json.loads(json.dumps(new)), scale={}))


def largest_first(found: Sequence[Difference]) -> list[Difference]:
    """Structure and words first, then numbers by how much they differ."""
    return sorted(found, key=lambda one: -math.inf if one.ratio is None else -abs(one.ratio))


def _path(case: str) -> Path:
    return DATA / f"{case}.json.gz"


def _compared(
    case: str, where: str, old: Tree, new: Tree, *, scale: Mapping[str, float]
) -> Iterator[Difference]:
    if isinstance(old, dict) and isinstance(new, dict):
        yield from _mappings(case, where, old, new, scale)
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for place, (one, other) in enumerate(zip(old, new, strict=True)):
            yield from _compared(case, f"{where}[{place}]", one, other, scale=scale)
    elif _is_number(old) and _is_number(new):
        if not _agree(where, float(old), float(new), scale):
            ratio = math.inf if old == 0 else (new - old) / abs(old)
            yield Difference(case=case, where=where, recorded=old, now=new, ratio=ratio)
    elif old != new or type(old) is not type(new):
        old, new = _first_unlike(old, new)
        yield Difference(case=case, where=where, recorded=old, now=new, ratio=None)


def _mappings(
    case: str, where: str, old: Tree, new: Tree, scale: Mapping[str, float]
) -> Iterator[Difference]:
    if set(old) == set(new) == {"drawn", "figures"}:
        yield from _tables(case, where, old, new)
        return
    scale = dict(scale) | _scale(old)
    for name in [*old, *(name for name in new if name not in old)]:
        there = f"{where}.{name}" if where else name
        if name in old and name in new:
            yield from _compared(case, there, old[name], new[name], scale=scale)
        else:
            gone = (old.get(name), "nothing") if name in old else ("nothing", new[name])
            yield Difference(case=case, where=there, recorded=gone[0], now=gone[1], ratio=None)


def _tables(case: str, where: str, old: Tree, new: Tree) -> Iterator[Difference]:
    """Compare row by row where the rows are the same ones."""
    asked, answered = rows_of(old), rows_of(new)
    if asked != answered:
        before, after = ([json.dumps(row) for row in rows] for rows in (asked, answered))
        known, there = set(before), set(after)
        gone = [(row, "nothing") for row in before if row not in there]
        for one, other in (*gone, *[("nothing", row) for row in after if row not in known]):
            yield Difference(
                case=case, where=f"{where} row".strip(), recorded=one, now=other, ratio=None
            )
        return
    for place, fields in enumerate(asked):
        name = f"{where} row {place} ({_row_words(fields)})".strip()
        yield from _compared(case, name, _figures(old, place), _figures(new, place), scale={})


def _figures(table: Tree, place: int) -> dict[str, Any]:
    return {name: values[place] for name, values in table["figures"].items()}


def _scale(values: Mapping[str, Any]) -> dict[str, float]:
    """What differences of large terms beside these values were taken from."""
    found = {}
    for ending, fields in (("_s", STEPS), ("_bytes", PEAKS)):
        held = (values[name] for name in fields if name in values)
        each = (one if isinstance(one, list) else [one] for one in held)
        numbers = [abs(float(one)) for some in each for one in some if _is_number(one)]
        if numbers:
            found[ending] = max(numbers)
    return found


def _agree(where: str, old: float, new: float, scale: Mapping[str, float]) -> bool:
    if old == new or (math.isnan(old) and math.isnan(new)):
        return True
    field = where.rpartition(".")[2].partition("[")[0]
    room = next((size for ending, size in scale.items() if field.endswith(ending)), 0.0)
    # Parts of a breakdown are named by their cause alone.
    room = scale.get("_s", 0.0) if ".breakdown_s." in where else room
    room = 1.0 if field.endswith(RATIOS) else room
    return abs(new - old) <= TOLERANCE * max(abs(old), abs(new), room)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _first_unlike(old: Tree, new: Tree) -> tuple[Tree, Tree]:
    """Of two lists of unlike length, the first lines that differ."""
    if not isinstance(old, list) or not isinstance(new, list):
        return old, new
    for one, other in zip(old, new, strict=False):
        if one != other:
            return one, other
    shorter = min(len(old), len(new))
    return (old[shorter:] or "its end", new[shorter:] or "its end")


SHORT: Final = {
    "tensor_model_parallel_size": "TP",
    "pipeline_model_parallel_size": "PP",
    "virtual_pipeline_model_parallel_size": "VPP",
    "context_parallel_size": "CP",
    "data_parallel_size": "DP",
    "expert_model_parallel_size": "EP",
    "expert_tensor_parallel_size": "ETP",
    "micro_batch_size": "micro-batch",
    "zero_stage": "ZeRO",
    "recompute": "recompute",
}


def _row_words(row: Mapping[str, Any]) -> str:
    words = [f"{short} {row[name]}" for name, short in SHORT.items() if name in row]
    return ", ".join(words or [f"{name} {value}" for name, value in row.items() if value])


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= NAMING else f"{text[:NAMING]}..."
