"""What an adapter is given and what it returns."""

from dataclasses import dataclass
from typing import Protocol


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
