"""Input and output of an adapter."""

from dataclasses import dataclass
from typing import Final, Protocol

LEAST_STEP_S: Final = 1e-9
MOST_STEP_S: Final = 1e7
MOST_BYTES: Final = 2**63
"""Numbers beyond these are mistakes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialWork:
    """Quantities of a trial that turn a throughput into a step time."""

    num_devices: int
    samples_per_step: int
    tokens_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """Content of one log line."""

    step: int | None = None
    """The engine's step number; None if it prints none."""
    step_s: float | None = None
    peak_bytes: int | None = None
    """Peak device memory of one rank, bytes."""
    activation_bytes: tuple[int, ...] = ()
    """Activation bytes by pipeline rank, the peak over its devices."""
    samples_per_step: int | None = None
    """Samples per step by the engine's own count; its later rates refer to it."""


def believable(reading: LogLine) -> LogLine | None:
    """Return the reading; None if one of its numbers is impossible."""
    sizes = (reading.peak_bytes, reading.samples_per_step, *reading.activation_bytes)
    if not all(0 <= size <= MOST_BYTES for size in sizes if size is not None):
        return None
    step_s = reading.step_s
    return reading if step_s is None or LEAST_STEP_S <= step_s <= MOST_STEP_S else None


class Adapter(Protocol):
    """Reads one line of a log."""

    def __call__(self, line: str, job: TrialWork) -> LogLine | None: ...


def number(text: str) -> float:
    """Read a positive number, also with thousands separators; 0 if it is none."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return 0.0
    return value if 0.0 < value < float("inf") else 0.0
