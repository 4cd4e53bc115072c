"""An operation of a step, and what gives it a price.

A stack turns a model and a configuration into a list of operations (`Op`); a price book turns an
operation into seconds. Stacks differ in their lists and in what overlaps, never in a price.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from profilers.records import Case, Direction
from tuner.config.columns import Numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """What one device, or one group of them, does: a row of a profile with its place in a step."""

    operation: str
    """A table of a profile (profilers/records.AXES), or what no profiler measures."""
    axes: Mapping[str, Numbers]
    """Sizes: numbers, or arrays of one entry per configuration."""
    kind: str = ""
    dtype: str = ""
    """Of the operands; empty: that of the stack's linear layers, or none."""
    direction: Direction = ""
    """Of the kernel; collectives and copies have none."""
    part: str = ""
    """Of the step."""
    in_backward: bool = False
    count: int = 1
    """How often it runs."""

    @property
    def name(self) -> str:
        """Of the operation and its kind, for people."""
        return "/".join(word for word in (self.operation, self.kind) if word)

    def case(self) -> Case:
        """Return what a profiler has to measure; sizes are whole numbers."""
        return Case(
            operation=self.operation,
            kind=self.kind,
            dtype=self.dtype,
            direction=self.direction,
            axes={axis: int(size) for axis, size in self.axes.items()},
        )


class PriceBook(Protocol):
    """Prices of operations on one kind of device and its links."""

    def seconds(self, op: Op, /) -> Numbers:
        """Wall time of running it once."""


def total_s(ops: Iterable[Op], prices: PriceBook) -> Numbers:
    """Add up what operations take that run one after the other."""
    return sum((op.count * prices.seconds(op) for op in ops), start=0.0)
