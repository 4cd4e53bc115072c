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

from profilers.steps.config import Recompute
from tuner.costs.reference.operations import COMMUNICATION, arrival_skew, layer_ops
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.prices.ops import Op
from tuner.prices.profile import ProfilePrices

PartSeconds = Mapping[str, float]
"""Seconds by part of a step (`operations.Part`)."""


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


def pass_time(ops: Sequence[Op], prices: ProfilePrices) -> PassTime:
    """Price a list of operations without recomputation."""
    return PassTime(
        forward_s=_by_part([op for op in ops if not op.in_backward], prices),
        backward_s=_by_part([op for op in ops if op.in_backward], prices),
        recompute_s={},
    )


def layer_time(
    work: Workload,
    degrees: StepDegrees,
    prices: ProfilePrices,
    *,
    layer: int,
    recompute: Recompute,
    chunks: int,
) -> PassTime:
    """Price one layer of one micro-batch on its most-loaded rank."""
    outside, inside = (
        pass_time(ops, prices) for ops in layer_ops(work, degrees, layer=layer, chunks=chunks)
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
    total: Counter[str] = Counter()
    for part_seconds in parts:
        for part, seconds in part_seconds.items():
            total[part] += seconds  # type: ignore[assignment]  # Counter's stub knows ints only
    return dict(total)


def scale_parts(seconds: PartSeconds, factor: float) -> PartSeconds:
    """Multiply every part."""
    return {part: value * factor for part, value in seconds.items()}


def _by_part(ops: Sequence[Op], prices: ProfilePrices) -> PartSeconds:
    total: dict[str, float] = {}
    for op in ops:
        total[op.part] = total.get(op.part, 0.0) + op.count * prices.seconds(op)
    compute_s = sum(value for part, value in total.items() if part not in COMMUNICATION)
    return sum_parts((total, _arrival_skew_s(ops, prices, compute_s=compute_s)))


def _arrival_skew_s(ops: Sequence[Op], prices: ProfilePrices, *, compute_s: float) -> PartSeconds:
    """Arrival skew of a pass's collectives, by the part that calls them."""
    collectives = [op for op in ops if op.operation == "collective" and op.kind != "send_recv"]
    count = sum(op.count for op in collectives)
    if not count or compute_s <= 0.0:
        return {}
    lost: dict[str, float] = {}
    for op in collectives:
        each_s = prices.seconds(arrival_skew(op, work_s=compute_s / count))
        lost[op.part] = lost.get(op.part, 0.0) + op.count * each_s
    return lost
