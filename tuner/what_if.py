"""What a plan would be under other limits: the change that is asked for, and the answer.

    Change    `nodes=+1`, `memory=-20%`, `bandwidth=x2`, `batch=512`, `nodes@h100=/2`
    Outcome   what the question so changed was answered with
    WhatIf    the plan's own question and the changed ones, solved in the same way
    Rival     a runner-up, and the terms that it pays more or less
    Why       all of it: what `moetune explain --json` adds to a plan

The values are here, what solves for them in tuner/explain/.
"""

import re
from typing import Final, Literal

from pydantic import Field

from profilers.records import Record, Seconds
from tuner.errors import TunerError

KEYS: Final = {
    "nodes": "machines of a pool",
    "memory": "bytes of one device",
    "bandwidth": "network cards, and links between pools",
    "batch": "sequences of one optimizer step (train)",
    "sequence-length": "tokens of one sequence (train)",
    "rate": "requests per second, a trace's own or those that a closed loop brings (serve)",
    "concurrency": "requests under way (serve)",
    "input-tokens": "of a prompt (serve)",
    "output-tokens": "of an answer (serve)",
    "ttft": "every target of the time to the first token (serve)",
    "tpot": "every target of the time per output token (serve)",
    "slots": "experts that every rank holds in a layer (place)",
}
"""What can be changed, and what it means."""

MOST_CHANGES: Final = 32
"""In one question; each is a solve of its own."""

_CHANGE: Final = re.compile(r"([a-z-]+)(?:@([^=]{1,200}))?=(\S{1,40})")

Band = tuple[float, float]


class Change(Record):
    """One limit moved."""

    key: str
    """One of `KEYS`."""
    pool: str | None = None
    """The pool that it is about; None: every pool, where the key is about pools."""
    value: str
    """`+1`, `-20%`, `x2`, `/2`, or the new value itself, with its unit where it has one."""

    def __str__(self) -> str:
        return f"{self.key}{f'@{self.pool}' if self.pool else ''}={self.value}"


Status = Literal["optimal", "feasible", "infeasible", "unknown", "refused", "out_of_time"]


class Outcome(Record):
    """The answer to one question."""

    change: str
    """As it was asked; empty for the question of the plan itself."""
    says: str
    """The change in words, with the value before and after."""
    status: Status
    """As of a certificate; `refused`: the changed spec is illegal or makes no difference to what is
    priced; `out_of_time`: it was not asked."""
    reason: str = ""
    """What binds the answer, or why there is none."""
    num_devices: int | None = None
    decision: str = ""
    """In short."""
    decision_changes: tuple[str, ...] = ()
    """What is chosen otherwise than as planned."""
    objective: str = ""
    """Which of the figures `gain_ratio` is about."""
    figures: dict[str, float] = Field(default_factory=dict)
    """Predicted, SI units in the names."""
    bands: dict[str, Band] = Field(default_factory=dict)
    """Of those figures that have one."""
    gain_ratio: float | None = None
    """How much better the objective is than as planned, as a share of that; negative is worse."""
    solve_s: Seconds = 0.0
    """Wall time of the whole answer."""


class WhatIf(Record):
    """Questions that were solved in the same way."""

    base: Outcome
    """The plan's own question, solved again."""
    outcomes: tuple[Outcome, ...]
    time_limit_s: Seconds
    """That all of them had together."""


class Rival(Record):
    """A runner-up against the plan's decision."""

    decision: str
    within_band: bool
    ratio_band: Band | None = None
    """Of training: seconds of its step over those of the decision's, as they may measure."""
    lost_by: str
    slower_s: float | None = None
    """How much longer it takes: a step of training, or a step of decode; None where no seconds
    were priced."""
    terms_s: dict[str, float] = Field(default_factory=dict)
    """What it pays more (or less, negative) by cause; they add up to `slower_s`."""
    figures: dict[str, float] = Field(default_factory=dict)


class Why(Record):
    """What `moetune explain` adds to a plan."""

    rivals: tuple[Rival, ...]
    what_if: WhatIf | None = None
    """None where nothing was asked."""
    notes: tuple[str, ...] = ()


def parse_changes(text: str) -> tuple[Change, ...]:
    """Read changes that are separated by commas.

    Raises:
        TunerError: one is unreadable, names nothing that can be changed, or there are too many.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) > MOST_CHANGES:
        raise TunerError(f"--what-if: {len(parts)} changes; at most {MOST_CHANGES} are solved")
    return tuple(_parsed(part) for part in dict.fromkeys(parts))


def _parsed(text: str) -> Change:
    match = _CHANGE.fullmatch(text)
    if match is None:
        raise TunerError(
            f"--what-if: {text[:60]!r} is no change; write one like nodes=+1, memory=-20%,"
            " bandwidth=x2, batch=512 or nodes@POOL=/2"
        )
    key, pool, value = match.groups()
    if key not in KEYS:
        raise TunerError(f"--what-if: {key!r} cannot be changed; what can: {', '.join(KEYS)}")
    return Change(key=key, pool=pool, value=value)


def moved(change: Change, current: float) -> float | None:
    """Return a number after a change; None where the change states the new value itself.

    Raises:
        TunerError: the change is no arithmetic, or leaves nothing.
    """
    sign, rest = change.value[:1], change.value[1:]
    if sign not in ("+", "-", "x", "/"):
        return None
    is_share = rest.endswith("%") and sign in ("+", "-")
    try:
        by = float(rest.removesuffix("%") if is_share else rest)
    except ValueError as error:
        raise TunerError(
            f"--what-if: {str(change)!r}: {rest!r} is not a number; +N, -N, +N%, xN and /N change"
            " what is there, anything else replaces it"
        ) from error
    by = by / 100.0 * current if is_share else by
    found = {
        "+": lambda: current + by,
        "-": lambda: current - by,
        "x": lambda: current * by,
        "/": lambda: current / by if by else float("inf"),
    }[sign]()
    if not 0.0 < found < float("inf"):
        raise TunerError(f"--what-if: {str(change)!r} makes {found:g} of {current:g}")
    return found
