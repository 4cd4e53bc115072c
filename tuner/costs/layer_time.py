"""Seconds of one layer for one micro-batch, by part, under each way to run it.

Let out be what runs outside of the chunks and in(c) what runs inside of c chunks; forward f,
backward b:

    none          out_f + in_f(1)      out_b + in_b(1)
    selective/c   out_f + in_f(c)      out_b + in_b(c)             + again in_f(c)
    full/c        out_f + in_f(c)      out_b + in_b(c)             + again out_f + in_f(c)

The second forward pass of a fully recomputed layer skips its chunks, which run again on their own.
Source: this is what profilers/steps does; MemFine (arXiv 2511.21431) gives no time model.

Every collective is a meeting of its group, and whoever comes first waits. With k meetings in a pass
whose own work takes w, each costs what the profile saw ranks lose after w / k of work
(profilers/links/arrival_skew.py), on top of the collective's own time.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from profilers.records import Case
from profilers.steps.config import Recompute
from tuner.costs.kernel_table import KernelTable
from tuner.costs.operations import COMMUNICATION, Call, Part, layer_calls, rendezvous
from tuner.costs.workload import Degrees, Workload

PartSeconds = Mapping[Part, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Seconds of something that runs forward and backward."""

    forward_s: PartSeconds
    backward_s: PartSeconds
    recompute_s: PartSeconds

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(self.by_part().values())

    def by_part(self) -> PartSeconds:
        """Forward, backward and recomputation together."""
        return added((self.forward_s, self.backward_s, self.recompute_s))


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
    degrees: Degrees,
    table: KernelTable,
    *,
    layer: int,
    recompute: Recompute,
    chunks: int,
) -> PassTime:
    """Price one layer of one micro-batch on its busiest rank."""
    outside, inside = (
        call_time(calls, table) for calls in layer_calls(work, degrees, layer=layer, chunks=chunks)
    )
    again: tuple[PartSeconds, ...] = ()
    if recompute is Recompute.SELECTIVE:
        again = (inside.forward_s,)
    elif recompute is Recompute.FULL:
        again = (outside.forward_s, inside.forward_s)
    return PassTime(
        forward_s=added((outside.forward_s, inside.forward_s)),
        backward_s=added((outside.backward_s, inside.backward_s)),
        recompute_s=added(again),
    )


def added(parts: Iterable[PartSeconds]) -> PartSeconds:
    """Add up seconds part by part."""
    total: Counter[Part] = Counter()
    for one in parts:
        for part, seconds in one.items():
            total[part] += seconds  # type: ignore[assignment]  # Counter's stub knows ints only
    return dict(total)


def scaled(seconds: PartSeconds, factor: float) -> PartSeconds:
    """Multiply every part."""
    return {part: value * factor for part, value in seconds.items()}


def _by_part(pairs: Sequence[tuple[Call, tuple[Case, ...]]], table: KernelTable) -> PartSeconds:
    total: dict[Part, float] = {}
    for call, cases in pairs:
        for case in cases:
            total[call.part] = total.get(call.part, 0.0) + call.times * table.seconds(case)
    waiting = _waiting(pairs, table, own_work_s=_own_work(total))
    return added((total, waiting))


def _own_work(seconds: PartSeconds) -> float:
    return sum(value for part, value in seconds.items() if part not in COMMUNICATION)


def _waiting(
    pairs: Sequence[tuple[Call, tuple[Case, ...]]], table: KernelTable, *, own_work_s: float
) -> PartSeconds:
    """Seconds lost at the meetings of a pass, by the part that calls them."""
    meetings = [
        (call.part, call.times, case)
        for call, cases in pairs
        for case in cases
        if case.operation == "collective" and case.kind != "send_recv"
    ]
    count = sum(times for _, times, _ in meetings)
    if not count or own_work_s <= 0.0:
        return {}
    lost: dict[Part, float] = {}
    for part, times, case in meetings:
        each_s = table.seconds(rendezvous(case, work_s=own_work_s / count))
        lost[part] = lost.get(part, 0.0) + times * each_s
    return lost
