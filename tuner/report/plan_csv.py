"""The candidates of a plan as one CSV.

train   the plan, its runners-up, their variants and the Pareto front of time and memory
serve   the Pareto front of tokens/s per device and per user, by mode
place   every workload, current and planned
"""

from collections.abc import Iterator
from typing import Final

from tuner.config.train_words import train_words
from tuner.csv_text import csv_text
from tuner.plans.place import PlacePlan
from tuner.plans.serve import FrontPoint, ServePlan
from tuner.plans.train import Alternative, Plan

TRAIN: Final = (
    *("kind", "decision", "step_time_s", "step_time_s_low", "step_time_s_high"),
    *("tokens_per_s_per_device", "peak_memory_bytes", "cost_per_step"),
    *("ratio_low", "ratio_high", "within_band", "lost_by"),
)
PLACE: Final = (
    *("workload", "imbalance_before", "imbalance_rule", "imbalance_after"),
    *("before_s", "rule_s", "after_s"),
)


def train_csv(plan: Plan) -> str:
    """Return the text of the file; only a header if the plan has no decision."""
    return csv_text(TRAIN, _candidates(plan))


def serve_csv(plan: ServePlan) -> str:
    """Return the text of the file; only a header if the plan has no decision."""
    header = tuple(FrontPoint.model_fields)
    return csv_text(header, (tuple(dict(point).values()) for point in plan.pareto))


def place_csv(plan: PlacePlan) -> str:
    """Return the text of the file; only a header if the plan has no decision."""
    return csv_text(PLACE, _workloads(plan))


def _candidates(plan: Plan) -> Iterator[tuple[object, ...]]:
    if plan.decision is None or plan.predicted is None:
        return
    own = plan.predicted
    yield (
        *("plan", train_words(plan.decision), own.step_time_s, *own.step_time_s_band),
        *(own.tokens_per_s_per_device, max(own.peak_memory_bytes), None, None, None, None, ""),
    )
    for kind, others in (("alternative", plan.alternatives), ("variant", plan.variants)):
        yield from (_other(kind, one) for one in others)
    for point in plan.pareto:
        yield (
            *("front", train_words(point.decision), point.step_time_s, None, None, None),
            *(point.peak_memory_bytes, point.cost_per_step, None, None, None, ""),
        )


def _other(kind: str, one: Alternative) -> tuple[object, ...]:
    own = one.predicted
    return (
        *(kind, train_words(one.decision), own.step_time_s, *own.step_time_s_band),
        *(own.tokens_per_s_per_device, max(own.peak_memory_bytes), None),
        *(one.ratio_band or (None, None)),
        *(one.within_band, one.lost_by),
    )


def _workloads(plan: PlacePlan) -> Iterator[tuple[object, ...]]:
    if plan.predicted is None:
        return
    times = {one.workload: one for one in plan.predicted.layer_times}
    for one in plan.predicted.outcomes:
        own = times.get(one.workload)
        seconds = (None,) * 3 if own is None else (own.before_s, own.rule_s, own.after_s)
        yield (
            *(one.workload, one.imbalance_before, one.imbalance_rule, one.imbalance_after),
            *seconds,
        )
