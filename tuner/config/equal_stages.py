"""Groups identical pipeline stages (or ranks), to print each row once with its stage numbers.

A model of 61 layers on 16 stages has two or three different ones. Rows are identical if they are
equal as printed.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

Row = TypeVar("Row", bound=Hashable)

LEAST_RANGE: Final = 3
"""Least length of an arithmetic sequence that is written as a range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualStages(Generic[Row]):
    """Stages that share one row."""

    stages: tuple[int, ...]
    """Numbers of the stages, ascending."""
    row: Row

    @property
    def label(self) -> str:
        """Numbers of the stages in short, e.g. `0`, `2-15` or `1, 3, ... 13`."""
        return number_ranges(self.stages)


def equal_stages(rows: Sequence[Row]) -> tuple[EqualStages[Row], ...]:
    """Group equal rows, whose index is their stage, in the order of each group's first stage."""
    groups: dict[Row, list[int]] = {}
    for stage, row in enumerate(rows):
        groups.setdefault(row, []).append(stage)
    return tuple(EqualStages(stages=tuple(stages), row=row) for row, stages in groups.items())


def number_ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers briefly: `4, 6-9, 12`, or `1, 3, ... 13` for every second one."""
    return ", ".join(_ranges(numbers))


def _ranges(numbers: Sequence[int]) -> Iterator[str]:
    start = 0
    while start < len(numbers):
        end = _end_of_range(numbers, start)
        count = end - start
        if count < LEAST_RANGE and numbers[end - 1] - numbers[start] != count - 1:
            # Too short for a range: write the first alone, the next may begin one.
            yield str(numbers[start])
            start += 1
            continue
        yield _range(numbers[start:end])
        start = end


def _end_of_range(numbers: Sequence[int], start: int) -> int:
    """Return the end of the longest arithmetic sequence from an index on."""
    end = start + 1
    while end < len(numbers) and (
        end == start + 1 or numbers[end] - numbers[end - 1] == numbers[start + 1] - numbers[start]
    ):
        end += 1
    return end


def _range(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return str(first)
    if numbers[1] == first + 1:
        return f"{first}-{last}"
    return f"{first}, {numbers[1]}, ... {last}"
