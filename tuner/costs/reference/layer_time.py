"""Seconds of one layer for one micro-batch, by part, under each recomputation option.

Let out be what runs outside of the chunks and in(c) what runs inside of c chunks; forward f,
backward b:

                  forward              backward              recomputation
    none          out_f + in_f(1)      out_b + in_b(1)
    selective/c   out_f + in_f(c)      out_b + in_b(c)       in_f(c)
    full/c        out_f + in_f(c)      out_b + in_b(c)       out_f + in_f(c)

The second forward pass of a fully recomputed layer skips its chunks, which are recomputed
separately.
Source: this is what profilers/steps does; MemFine (arXiv 2511.21431) gives no time model.

A collective synchronises its group, so early ranks wait for stragglers. A pass with k collectives
and w seconds of compute pays k times the arrival skew measured after w / k seconds
(profilers/links/arrival_skew.py), besides the collectives' own time.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from profilers.records import Case
from profilers.steps.config import Recompute
from tuner.costs.prices.kernel_table import KernelTable
from tuner.costs.reference.operations import (
    COMMUNICATION,
    Call,
    Part,
    arrival_skew_case,
    layer_calls,
)
from tuner.costs.reference.workload import StepDegrees, Workload

PartSeconds = Mapping[Part, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Seconds of an operation list, forward and backward."""

    forward_s: PartSeconds
    backward_s: PartSeconds
    recompute_s: PartSeconds

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self.by_part().values())

    def by_part(self) -> PartSeconds:
        """Forward, backward and recomputation together."""
        return sum_parts((self.forward_s, self.backward_s, self.recompute_s))


def call_time(calls: Iterable[Call], table: KernelTable) -> PassTime:
    """Price a list of calls without recomputation."""
    calls = tuple(calls)
    return PassTime(
        forward_s=_by_part([(call, call.forward) for call in calls], table),
        backward_s=_by_part([(call, call.backward) for call in calls], table),
        recompute_s={},
    )


def layer_time(
    work: Workload,
    degrees: StepDegrees,
    table: KernelTable,
    *,
    layer: int,
    recompute: Recompute,
    chunks: int,
) -> PassTime:
    """Price one layer of one micro-batch on its most-loaded rank."""
    outside, inside = (
        call_time(calls, table) for calls in layer_calls(work, degrees, layer=layer, chunks=chunks)
    )
    recomputed: tuple[PartSeconds, ...] = ()
    if recompute is Recompute.SELECTIVE:
        recomputed = (inside.forward_s,)
    elif recompute is Recompute.FULL:
        recomputed = (outside.forward_s, inside.forward_s)
    return PassTime(
        forward_s=sum_parts((outside.forward_s, inside.forward_s)),
        backward_s=sum_parts((outside.backward_s, inside.backward_s)),
        recompute_s=sum_parts(recomputed),
    )


def sum_parts(parts: Iterable[PartSeconds]) -> PartSeconds:
    """Add up seconds part by part."""
    total: Counter[Part] = Counter()
    for one in parts:
        for part, seconds in one.items():
            total[part] += seconds  # type: ignore[assignment]  # Counter's stub knows ints only
    return dict(total)


def scale_parts(seconds: PartSeconds, factor: float) -> PartSeconds:
    """Multiply every part."""
    return {part: value * factor for part, value in seconds.items()}


def _by_part(pairs: Sequence[tuple[Call, tuple[Case, ...]]], table: KernelTable) -> PartSeconds:
    total: dict[Part, float] = {}
    for call, cases in pairs:
        for case in cases:
            total[call.part] = total.get(call.part, 0.0) + call.times * table.seconds(case)
    waiting = _arrival_skew_s(pairs, table, compute_s=_compute_s(total))
    return sum_parts((total, waiting))


def _compute_s(seconds: PartSeconds) -> float:
    return sum(value for part, value in seconds.items() if part not in COMMUNICATION)


def _arrival_skew_s(
    pairs: Sequence[tuple[Call, tuple[Case, ...]]], table: KernelTable, *, compute_s: float
) -> PartSeconds:
    """Arrival skew of a pass's collectives, by the part that calls them."""
    collectives = [
        (call.part, call.times, case)
        for call, cases in pairs
        for case in cases
        if case.operation == "collective" and case.kind != "send_recv"
    ]
    count = sum(times for _, times, _ in collectives)
    if not count or compute_s <= 0.0:
        return {}
    lost: dict[Part, float] = {}
    for part, times, case in collectives:
        each_s = table.seconds(arrival_skew_case(case, work_s=compute_s / count))
        lost[part] = lost.get(part, 0.0) + times * each_s
    return lost
