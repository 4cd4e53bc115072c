"""What-ifs: a plan under other limits.

    Change    `nodes=+1`, `memory=-20%`, `bandwidth=x2`, `batch=512`, `nodes@h100=/2`
    Outcome   the plan after one change
    WhatIf    the unchanged plan and the outcomes of all changes, solved in the same way
    Rival     a runner-up, and the terms in which it is slower or faster
    Why       all of it: what `moetune explain --json` adds to a plan

These are the values; tuner/explain/ solves for them.
"""

import re
from typing import Final, Literal

from pydantic import Field

from profilers.records import Record, Seconds
from tuner.errors import TunerError

KEYS: Final = {
    "nodes": "machines of a pool",
    "memory": "bytes of one device",
    "bandwidth": "NICs, and links between pools",
    "batch": "sequences of one optimizer step (train)",
    "sequence-length": "tokens of one sequence (train)",
    "rate": "requests per second, a trace's own or those that a closed loop brings (serve)",
    "concurrency": "concurrent requests (serve)",
    "input-tokens": "of a prompt (serve)",
    "output-tokens": "of an output (serve)",
    "ttft": "every SLO target of the time to the first token (serve)",
    "tpot": "every SLO target of the time per output token (serve)",
    "slots": "experts that every rank holds in a layer (place)",
}
"""Limits that can be changed, each with its meaning."""

IDLE: Final = "a plan must use every device; without the added nodes the plan stays as it is"
"""Note where more nodes bring no gain."""
MOST_CHANGES: Final = 32
"""Most changes of one call; each is solved by itself."""

_CHANGE: Final = re.compile(r"([a-z-]+)(?:@([^=]{1,200}))?=(\S{1,40})")

Band = tuple[float, float]


class LimitChange(Record):
    """One limit moved."""

    key: str
    """Limit to change, one of `KEYS`."""
    pool: str | None = None
    """Pool to change; None: every pool, where the limit is one of pools."""
    value: str
    """New value: `+1`, `-20%`, `x2`, `/2`, or the value itself, with its unit where it has one."""

    def __str__(self) -> str:
        return f"{self.key}{f'@{self.pool}' if self.pool else ''}={self.value}"


Status = Literal["optimal", "feasible", "infeasible", "unknown", "refused", "out_of_time"]


class WhatIfOutcome(Record):
    """The plan after one change."""

    change: str
    """Change as requested; empty for the unchanged plan."""
    says: str
    """Change in words, with the value before and after."""
    status: Status
    """Status as of a certificate; `refused`: the changed spec is illegal or makes no difference to
    what is priced; `out_of_time`: it was not solved."""
    reason: str = ""
    """Binding constraint, or the reason why there is no plan."""
    num_devices: int | None = None
    decision: str = ""
    """Short form of the decision; empty without one."""
    decision_changes: tuple[str, ...] = ()
    """Differences of the decision from the unchanged plan's."""
    objective: str = ""
    """Figure that `gain_ratio` is about."""
    figures: dict[str, float] = Field(default_factory=dict)
    """Predicted figures by name, in SI units as the names say."""
    bands: dict[str, Band] = Field(default_factory=dict)
    """Error bands of those figures that have one, by name of the figure."""
    gain_ratio: float | None = None
    """Improvement of the objective over the unchanged plan's, as a share of that; negative is
    worse."""
    solve_s: Seconds = 0.0
    """Wall time of the solve."""


class WhatIf(Record):
    """The unchanged plan and the outcomes of changes, solved in the same way."""

    base: WhatIfOutcome
    """The unchanged plan, solved again."""
    outcomes: tuple[WhatIfOutcome, ...]
    time_limit_s: Seconds
    """Time limit of all solves together, seconds."""


class Rival(Record):
    """A runner-up against the plan's decision."""

    decision: str
    within_band: bool
    ratio_band: Band | None = None
    """Band of the measured ratio of its step to the decision's, for training."""
    lost_by: str
    slower_s: float | None = None
    """Additional seconds of a training or decode step; None where no seconds were priced."""
    terms_s: dict[str, float] = Field(default_factory=dict)
    """Additional seconds (or fewer, negative) by cause; they add up to `slower_s`."""
    figures: dict[str, float] = Field(default_factory=dict)


class Why(Record):
    """Explanation that `moetune explain` adds to a plan."""

    rivals: tuple[Rival, ...]
    what_if: WhatIf | None = None
    """Outcomes of the requested changes; None where no changes were requested."""
    notes: tuple[str, ...] = ()


def parse_changes(text: str) -> tuple[LimitChange, ...]:
    """Parse changes that are separated by commas.

    Raises:
        TunerError: one is unreadable, names an unknown limit, or there are too many.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) > MOST_CHANGES:
        raise TunerError(f"--what-if: {len(parts)} changes; at most {MOST_CHANGES} are solved")
    return tuple(_parsed(part) for part in dict.fromkeys(parts))


def _parsed(text: str) -> LimitChange:
    match = _CHANGE.fullmatch(text)
    if match is None:
        raise TunerError(
            f"--what-if: {text[:60]!r} is no change; write one like nodes=+1, memory=-20%,"
            " bandwidth=x2, batch=512 or nodes@POOL=/2"
        )
    key, pool, value = match.groups()
    if key not in KEYS:
        raise TunerError(f"--what-if: {key!r} cannot be changed; what can: {', '.join(KEYS)}")
    return LimitChange(key=key, pool=pool, value=value)


def moved(change: LimitChange, current: float) -> float | None:
    """Return a number after a change; None where the change states the new value itself.

    Raises:
        TunerError: the change is not arithmetic, or the result is not positive and finite.
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
    after = {
        "+": lambda: current + by,
        "-": lambda: current - by,
        "x": lambda: current * by,
        "/": lambda: current / by if by else float("inf"),
    }[sign]()
    if not 0.0 < after < float("inf"):
        raise TunerError(f"--what-if: {str(change)!r} makes {after:g} of {current:g}")
    return after
