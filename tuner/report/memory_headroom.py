"""Running out of memory in words: the warning, the cost of more headroom, the preference."""

from collections.abc import Iterator
from typing import Final

from tuner.config.train_words import train_words
from tuner.plans.train import Plan, Preference, TrainPrediction
from tuner.search.train.memory_risk import SMALL, loss_prices, whole_loss_s
from tuner.search.train.preference import TOLERANCE_RATIO, is_excluded, memory_step
from tuner.spec.goal import TrainGoal
from tuner.units import format_bytes, format_ratio, format_s

HARDLY_ANY: Final = 0.001
"""Smaller probabilities are not given in figures: there are too few published peaks."""


def memory_warning(plan: Plan) -> str | None:
    """Warn that the plan's decision may run out of memory; None if it is unlikely."""
    predicted = plan.predicted
    if predicted is None or not needs_memory_warning(predicted):
        return None
    return f"{chance_sentence(predicted, plan.goal)}. {_relaxation_words(plan)}"


def needs_memory_warning(predicted: TrainPrediction) -> bool:
    """Return whether the probability of running out of memory deserves a warning at the top."""
    return (predicted.out_of_memory_probability or 0.0) > SMALL


def chance_sentence(predicted: TrainPrediction, goal: TrainGoal) -> str:
    """Say how likely the run is out of memory, and what failed starts cost.

    Over heterogeneous pools, of the device that is likeliest to run out.
    """
    chance, against = predicted.out_of_memory_probability or 0.0, _against(predicted)
    if chance < HARDLY_ANY:
        return f"hardly any chance of running out of memory{against}"
    at_start = format_ratio(predicted.out_of_memory_at_start_probability or 0.0)
    return (
        f"{format_ratio(chance)} chance of running out of memory ({at_start} at the start)"
        f"{against}; "
        + lost_starts_words(
            predicted.out_of_memory_loss_s or 0.0,
            assumed_run_s=loss_prices(goal).assumed_run_s(predicted.step_time_s),
        )
    )


def lost_starts_words(loss_s: float, *, assumed_run_s: float | None) -> str:
    """Say what failed starts cost, without the slower step afterwards.

    Args:
        loss_s: seconds of the run.
        assumed_run_s: assumed seconds of the run; None if the goal states its tokens.
    """
    run = "the run"
    if assumed_run_s is not None:
        run = f"a run of {format_s(assumed_run_s)}, assumed as goal.tokens is not stated"
    return f"failed starts and restarts are expected to take {format_s(loss_s)} of {run}"


def _against(predicted: TrainPrediction) -> str:
    """Give the predicted peak and the device's capacity."""
    has, at_risk = predicted.memory_capacity_bytes, predicted.rank_at_risk
    if at_risk is not None:
        peak, capacity = at_risk.peak_memory_bytes, at_risk.memory_capacity_bytes
        return (
            f", {format_bytes(peak)} predicted on pipeline rank {at_risk.pipeline_rank} of the "
            f"{format_bytes(capacity)} that a device of pool {at_risk.pool!r} has"
        )
    if has is None:
        return ""
    peak = max(predicted.peak_memory_bytes)
    return f", {format_bytes(peak)} predicted of the {format_bytes(has)} that a device has"


def peak_band_words(predicted: TrainPrediction) -> str:
    """Give the band of the peak."""
    at_risk = predicted.rank_at_risk
    bands = predicted.peak_memory_bytes_band
    low, high = (
        max(bands, key=lambda band: band[1]) if at_risk is None else bands[at_risk.pipeline_rank]
    )
    which = "the highest" if at_risk is None else f"pipeline rank {at_risk.pipeline_rank}'s"
    return f"{which} peak is between {format_bytes(low)} and {format_bytes(high)}"


def trade_words(plan: Plan) -> Iterator[str]:
    """Compare the decision with the fastest, with running out of memory included.

    Two small probabilities are not compared, nor differences below the resolution of published
    peaks.
    """
    preferred, predicted = plan.preferred, plan.predicted
    if preferred is None or predicted is None:
        return
    chance = predicted.out_of_memory_probability
    fastest_chance = preferred.fastest_out_of_memory_probability
    if (
        chance is not None
        and fastest_chance is not None
        and is_excluded(fastest_chance, beside=chance)
    ):
        yield _excluded_words(fastest_chance, tried_first_s=preferred.fastest_tried_first_step_s)
        return
    if max(chance or 0.0, fastest_chance or 0.0) > SMALL:
        yield from _expected_words(preferred)
    if (
        chance is not None
        and fastest_chance is not None
        and memory_step(chance) > memory_step(fastest_chance)
    ):
        chances = f"{format_ratio(chance)} chance of running out of memory"
        yield f"{chances} instead of {format_ratio(fastest_chance)}"


def _excluded_words(chance: float, *, tried_first_s: float | None) -> str:
    """Say why the fastest is excluded, and what trying it first would cost."""
    said = f"the fastest is excluded: {format_ratio(chance)} chance of running out of memory"
    if tried_first_s is None:
        return said
    return (
        f"{said}; tried first, with this plan as fallback, a step is expected to take "
        f"{format_s(tried_first_s)}"
    )


def _expected_words(preferred: Preference) -> Iterator[str]:
    own_s, fastest_s = preferred.expected_step_s, preferred.fastest_expected_step_s
    if own_s is None or fastest_s is None:
        if preferred.fastest_out_of_memory_probability is not None:
            yield (
                "expected steps are not compared: no decision found has a chance of running out "
                f"of memory below {format_ratio(SMALL)}"
            )
        return
    verdict = "less"
    if own_s > fastest_s:
        verdict = f"a tie within {format_ratio(TOLERANCE_RATIO)}"
    if own_s > fastest_s * (1.0 + TOLERANCE_RATIO):
        verdict = f"{format_ratio(own_s / fastest_s - 1.0)} more"
    yield (
        f"expected step with running out of memory {format_s(own_s)}, the fastest's "
        f"{format_s(fastest_s)}: {verdict}"
    )


def _relaxation_words(plan: Plan) -> str:
    roomier = plan.roomier
    if roomier is None and plan.relaxations:
        options = "; ".join(f"{option.limit}: {option.change}" for option in plan.relaxations)
        return f"Every decision found is likely to run out of memory. Relaxations: {options}."
    if roomier is None and plan.no_roomier:
        return (
            f"No decision found has a chance below {format_ratio(SMALL)}: add nodes or memory "
            "per device."
        )
    if roomier is None and plan.roomier_within_ratio is None:
        return (
            "The search for decisions with more headroom was not finished: add nodes, or lower "
            "usable_memory_ratio of the pool."
        )
    if roomier is None:
        return (
            f"No decision found within {format_ratio(plan.roomier_within_ratio or 0.0)} of its "
            f"step has a chance below {format_ratio(SMALL)}: add nodes, or lower "
            "usable_memory_ratio of the pool."
        )
    assert plan.predicted is not None
    lost_s = whole_loss_s(
        plan.predicted.out_of_memory_loss_s or 0.0,
        chance=plan.predicted.out_of_memory_probability or 0.0,
        slower_s=roomier.slower_s,
    )
    where = "" if not roomier.pools else f" on {' and '.join(map(repr, roomier.pools))} instead"
    peak = format_bytes(roomier.peak_memory_bytes)
    if roomier.rank_at_risk is not None:
        has = format_bytes(roomier.rank_at_risk.memory_capacity_bytes)
        peak += f" of the {has} of pool {roomier.rank_at_risk.pool!r}"
    return (
        f"{train_words(roomier.decision)}{where} has "
        f"{format_ratio(roomier.out_of_memory_probability)} ({peak}) and takes "
        f"{format_ratio(roomier.slower_ratio)} longer, {format_s(roomier.slower_s)} of the run. "
        "Running out of memory and continuing with it is expected to cost "
        f"{format_s(lost_s)} of the run."
    )
