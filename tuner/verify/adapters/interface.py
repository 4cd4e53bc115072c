"""What an adapter is given and what it returns."""

from dataclasses import dataclass
from typing import Final, Protocol

LEAST_STEP_S: Final = 1e-9
MOST_STEP_S: Final = 1e7
MOST_BYTES: Final = 2**63
"""Beyond these a number is a mistake, and what follows from it has no meaning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What of a trial turns a throughput into a step time."""

    num_devices: int
    samples_per_step: int
    tokens_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one line tells."""

    step: int | None = None
    """The engine's own number of the step; None where it gives none."""
    step_s: float | None = None
    peak_bytes: int | None = None
    """Of the device memory of one rank."""
    activation_bytes: tuple[int, ...] = ()
    """Per pipeline rank, the fullest device."""
    samples_per_step: int | None = None
    """What the engine itself takes a step to hold; its later rates are of that."""


def believable(reading: Reading) -> Reading | None:
    """Return what a line tells; nothing where one of its numbers cannot be."""
    told = (reading.peak_bytes, reading.samples_per_step, *reading.activation_bytes)
    if not all(0 <= size <= MOST_BYTES for size in told if size is not None):
        return None
    step_s = reading.step_s
    return reading if step_s is None or LEAST_STEP_S <= step_s <= MOST_STEP_S else None


class Adapter(Protocol):
    """Reads one line of a log."""

    def __call__(self, line: str, job: Job) -> Reading | None: ...


def number(text: str) -> float:
    """Read a number that may hold thousands separators; 0 where it is none that counts."""
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return 0.0
    return value if 0.0 < value < float("inf") else 0.0
