"""Trials that fail for the same reason: after two of them no more are started.

Two configurations that crash with the same last error, or hang before the first step, point to the
environment: a missing module, a command that does not exist, a port in use. Further trials would
fail likewise. Running out of memory or being slow does not count: those are results about the
configuration. Nor does the end of a budget or a Slurm time limit, or a job that Slurm lost. A
successful trial shows that the environment works, so only failures since the last success count;
failures of an earlier call do not, because their cause may be fixed by now.

Reasons are compared without what differs between launches: folders, ports, addresses, dates.
"""

import re
from collections.abc import Collection, Sequence
from typing import Any, Final

from tuner.verify.launcher import NO_REPORT, NODE_GONE
from tuner.verify.records import AnyRecord, LaunchRecord, Trial

ENOUGH: Final = 2
"""Identical failures."""

FOLDER: Final = re.compile(r"[^\s'\"=:(\[]*/")
PASSING: Final = (
    re.compile(r"\d{4}-\d{2}-\d{2}[ T]?"),
    re.compile(r"\d{1,2}:\d{2}:\d{2}([.,]\d+)?"),
    re.compile(r"0x[0-9a-fA-F]+"),
    re.compile(r"(?<=:)\d{4,5}\b"),
    re.compile(r"\brank[ :]?\d+\b", re.IGNORECASE),
)
"""Dates, times, addresses, ports, and the first rank that failed."""

NO_RESPONSE: Final = "did not answer within"
"""Phrase in the reason of a deployment that was never ready."""
HUNG: Final = re.compile(rf"{NO_REPORT} \d+ s;|\S+ {NO_RESPONSE} \d+ s:")
"""The reason of a trial without a step before its deadline, or of a deployment that was never
ready."""


def failure_cause(ended: LaunchRecord[Any] | Trial) -> str:
    """Return the cause of a failure, equal for identical failures; empty if unknown."""
    if ended.status == "timeout":
        return "timeout" if HUNG.match(ended.reason) else ""
    if ended.status != "crashed" or not ended.reason or ended.reason == NODE_GONE:
        return ""
    cause = FOLDER.sub("", ended.reason)
    for passing in PASSING:
        cause = passing.sub("", cause)
    return f"crashed: {' '.join(cause.split())}"


def identical_failures(records: Sequence[AnyRecord]) -> tuple[AnyRecord, ...]:
    """Return the failures with one cause since the last success, if there are enough."""
    by_cause: dict[str, list[AnyRecord]] = {}
    for record in records:
        if record.status == "ok":
            by_cause.clear()
        elif cause := failure_cause(record):
            by_cause.setdefault(cause, []).append(record)
    return next((tuple(trials) for trials in by_cause.values() if len(trials) >= ENOUGH), ())


def stop_notes(
    records: Sequence[LaunchRecord[Any]], *, earlier: Collection[int], trials: int
) -> tuple[str, ...]:
    """Say why no more trials were started; nothing if failures were not the reason.

    Args:
        records: of all trials.
        earlier: numbers of the trials of earlier calls.
        trials: the requested number.
    """
    failures = identical_failures([one for one in records if one.number not in earlier])
    left = trials - sum(one.origin != "repeat" for one in records)
    if not failures or left < 1:
        return ()
    return (
        f"stopped: {len(failures)} trials failed identically, so {left} of {trials} were not"
        " launched; fix the cause and verify with --resume, which retries these first",
    )
