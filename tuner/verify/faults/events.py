"""The events of one launch of the reference step, read while its ranks write them.

profilers/steps/events.py says what the lines are. A line that is not complete yet is left for the
next look.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from profilers.steps.events import file_of

EVENTS_NAME: Final = "events.jsonl"
MOST_LINE_BYTES: Final = 1 << 16

Event = Mapping[str, Any]


@dataclass(slots=True)
class RankEvents:
    """What one rank has written so far; mutable while its launch lasts."""

    path: Path
    offset: int = 0
    events: list[Event] = field(default_factory=list)

    def read(self) -> int:
        """Read what is new, and return the number of new events."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                data = file.read()
        except FileNotFoundError:
            return 0
        whole, _, _ = data.rpartition(b"\n")
        if not whole:
            return 0
        self.offset += len(whole) + 1
        new = list(_parsed(whole.split(b"\n")))
        self.events += new
        return len(new)

    def times(self, name: str) -> list[float]:
        """Return when the rank wrote an event, in seconds since 1970."""
        return [float(one["time_s"]) for one in self.events if one["event"] == name]

    def of(self, name: str) -> list[Event]:
        """Return the events of a name."""
        return [one for one in self.events if one["event"] == name]


def rank_events(folder: Path, *, world: int) -> list[RankEvents]:
    """Return the readers of a launch's ranks."""
    return [RankEvents(file_of(folder / EVENTS_NAME, rank)) for rank in range(world)]


def restored_at_s(ranks: Sequence[RankEvents]) -> float | None:
    """Return when the last rank had its state, None where one has not yet."""
    times = [rank.times("restored") for rank in ranks]
    return max(one[0] for one in times) if all(times) else None


def _parsed(lines: Sequence[bytes]) -> Iterator[Event]:
    for line in lines:
        if len(line) <= MOST_LINE_BYTES:
            one = json.loads(line)
            if isinstance(one, dict) and "event" in one:
                yield one
