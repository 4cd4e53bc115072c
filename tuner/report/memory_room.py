"""Running out of memory in words: the warning, what more room costs, what was given up for it."""

from collections.abc import Callable, Iterator

from tuner.plan import Plan, Preference, TrainDecision, TrainPrediction
from tuner.planner.analytic.memory_risk import SMALL
from tuner.planner.analytic.preferring import TOLERANCE_RATIO
from tuner.units import format_bytes, format_ratio, format_s


def memory_warning(plan: Plan, *, name: Callable[[TrainDecision], str]) -> str | None:
    """Say that the plan's decision may run out, and what would not; None where it hardly does."""
    predicted = plan.predicted
    if predicted is None or (predicted.out_of_memory_probability or 0.0) <= SMALL:
        return None
    return f"{chance_sentence(predicted)}. {_way_out(plan, name)}"


def chance_sentence(predicted: TrainPrediction) -> str:
    """Say how likely it runs out, against all that a device has, and what that costs."""
    peak = max(predicted.peak_memory_bytes)
    has = predicted.memory_capacity_bytes
    of_capacity = "" if has is None else f" of the {format_bytes(has)} that a device has"
    ever = format_ratio(predicted.out_of_memory_probability or 0.0)
    at_start = format_ratio(predicted.out_of_memory_at_start_probability or 0.0)
    return (
        f"{ever} chance of running out of memory ({at_start} at the start), {format_bytes(peak)} "
        f"predicted{of_capacity}; expected to cost "
        f"{format_s(predicted.out_of_memory_loss_s or 0.0)} of the run"
    )


def trade_words(one: Preference) -> Iterator[str]:
    """Say what both steps are expected to cost, where the fastest may run out."""
    own_s, fastest_s = one.expected_step_s, one.fastest_expected_step_s
    if own_s is None or fastest_s is None:
        return
    if (one.fastest_out_of_memory_probability or 0.0) <= SMALL:
        return
    verdict = f"equally fast ({format_ratio(TOLERANCE_RATIO)})" if own_s > fastest_s else "less"
    yield (
        "with what running out of memory costs on average a step takes "
        f"{format_s(own_s)}, the fastest's {format_s(fastest_s)}: {verdict}"
    )


def _way_out(plan: Plan, name: Callable[[TrainDecision], str]) -> str:
    one = plan.roomier
    if one is None and plan.roomier_within_ratio is None:
        return "More nodes, or a smaller usable_memory_ratio of the pool, make room."
    if one is None:
        return (
            f"No decision found within {format_ratio(plan.roomier_within_ratio or 0.0)} of its "
            f"step has a chance below {format_ratio(SMALL)}: more nodes, or a smaller "
            "usable_memory_ratio of the pool, make room."
        )
    return (
        f"{name(one.decision)} has {format_ratio(one.out_of_memory_probability)} "
        f"({format_bytes(one.peak_memory_bytes)}) and takes {format_ratio(one.slower_ratio)} "
        f"longer, {format_s(one.slower_s)} of the run."
    )
