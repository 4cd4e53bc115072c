"""Trials that fail for one and the same reason: after two of them no more are begun.

Two configurations that crash with the same last error, or hang without a step, tell of the
environment: a module that is missing, a command that does not exist, a port that is taken. All
further ones would end like them. Running out of memory is no such failure, nor is being slow: that
is what a trial finds out about its own configuration. Nor is the end of a budget, or of the time
that Slurm gives: another trial says more of neither. A trial that ran in between shows that the
environment works, so only failures since the last one count; and those of an earlier call do not,
whose reason may be mended by now.

Reasons are compared without what differs from launch to launch: folders, ports, addresses, dates.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from tuner.verify.deployments.server import NO_ANSWER
from tuner.verify.launcher import NO_REPORT

ENOUGH: Final = 2
"""Failures alike."""

FOLDER: Final = re.compile(r"[^\s'\"=:(\[]*/")
PASSING: Final = (
    re.compile(r"\d{4}-\d{2}-\d{2}[ T]?"),
    re.compile(r"\d{1,2}:\d{2}:\d{2}([.,]\d+)?"),
    re.compile(r"0x[0-9a-fA-F]+"),
    re.compile(r"(?<=:)\d{4,5}\b"),
    re.compile(r"\brank[ :]?\d+\b", re.IGNORECASE),
)
"""Dates, times, addresses, ports, and which of a trial's ranks was the first to fail."""

HUNG: Final = re.compile(rf"{NO_REPORT} \d+ s;|\S+ {NO_ANSWER} \d+ s:")
"""The reason of a trial that told no step until its own deadline, of a deployment that never
answered."""


class Outcome(Protocol):
    """How a trial ended."""

    @property
    def status(self) -> str: ...

    @property
    def reason(self) -> str: ...


class Ended(Outcome, Protocol):
    """A trial that ended."""

    @property
    def number(self) -> int: ...

    @property
    def origin(self) -> str: ...


Trial = TypeVar("Trial", bound=Ended)


def cause_of(ended: Outcome) -> str:
    """Return what made a trial fail, alike for trials that failed alike; empty where unknown."""
    if ended.status == "timeout":
        return "timeout" if HUNG.match(ended.reason) else ""
    if ended.status != "crashed" or not ended.reason:
        return ""
    cause = FOLDER.sub("", ended.reason)
    for passing in PASSING:
        cause = passing.sub("", cause)
    return f"crashed: {' '.join(cause.split())}"


def identical_failures(records: Sequence[Trial]) -> tuple[Trial, ...]:
    """Return the failures with one cause since the last trial that ran, where they are enough."""
    alike: dict[str, list[Trial]] = {}
    for record in records:
        if record.status == "ok":
            alike.clear()
        elif cause := cause_of(record):
            alike.setdefault(cause, []).append(record)
    return next((tuple(found) for found in alike.values() if len(found) >= ENOUGH), ())


@dataclass(kw_only=True, eq=False)
class FailureWatch:
    """Says when the trials of one call need not go on, and which of an earlier one to repeat."""

    _earlier: frozenset[int] | None = field(default=None, init=False)
    """Numbers of trials that had ended before the call."""

    def is_over(self, records: Sequence[Ended]) -> bool:
        """Whether no more trials need be begun; the first call sees those of earlier calls."""
        if self._earlier is None:
            self._earlier = frozenset(record.number for record in records)
        return bool(identical_failures(self._own(records)))

    def to_repeat(self, records: Sequence[Trial]) -> tuple[Trial, ...]:
        """Return the failures that ended an earlier call: their cause may be mended by now."""
        own = {record.number for record in self._own(records)}
        return identical_failures([one for one in records if one.number not in own])

    def said(self, records: Sequence[Ended], *, trials: int) -> tuple[str, ...]:
        """Say why no more trials were begun; nothing where the failures were not the reason.

        Args:
            records: of all trials.
            trials: that were asked for.
        """
        alike = identical_failures(self._own(records))
        left = trials - sum(one.origin != "repeat" for one in records)
        if not alike or left < 1:
            return ()
        return (
            f"stopped: {len(alike)} trials failed alike, so {left} of {trials} were not launched;"
            " mend the cause and verify with --resume, which launches these again first",
        )

    def _own(self, records: Sequence[Trial]) -> list[Trial]:
        earlier = self._earlier or frozenset()
        return [one for one in records if one.number not in earlier]
