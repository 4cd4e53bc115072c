"""Verdict on a placement: worth it or not, given the noise between passes, launches and runs.

A gain counts if it exceeds its variation from pass to pass, or from launch to launch where a rule
draws tables, and, as a share of a whole pass, the difference between two runs
of one configuration. A plan that saves less than EPLB's rule, beyond the noise of that difference,
is not recommended, unless it keeps a limit on moved experts, which EPLB does not. A plan that is
worse than no change on a workload it was not made from, or overloads a rank there, is fragile,
whatever it gains on its own workloads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from solvers.placement.ranks import Floats
from tuner.plans.place import LeftOut, MigrationCost, Verdict, WorkloadOutcome
from tuner.units import format_ratio

CONFIDENCE_FACTOR = 1.645
"""Standard errors of a one-sided 95 % statement."""

FEW_PASSES_FACTORS = (6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""Standard errors of a one-sided 95 % statement from 2, 3, ... batches: Student's t of 1, 2, ...
degrees of freedom."""

MAX_BATCHES = 10
"""Neighbouring passes hold the same documents; batches of many are nearly independent."""

RUN_TO_RUN_RATIO = 0.01
"""Difference between two runs of one served configuration: nine of ten repeated measurements of
TPOT on Hopper lie within 1.1 % in the published aiconfigurator data."""

FRAGILE_RATIO = 1.05
"""Load on an unseen workload over that without the plan, from which on the plan is fragile."""

OVERLOAD_RATIO = 1.5
"""Worst layer's imbalance on an unseen workload over that without the plan, from which on the plan
is fragile; affinity clustering was seen to make a rank 2.49 times overloaded on another domain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loads:
    """Loads of the workloads under a plan whose objective is traffic."""

    outcomes: Sequence[WorkloadOutcome]
    noises: Sequence[float]
    """Noise of each workload's change."""
    slack_ratio: float
    """Load above EPLB's that the goal allows."""


def gain_noise(before_P: Floats, after_P: Floats, *, counted: float, launches: int = 1) -> float:
    """Return the uncertainty of the mean gain, at 95 %.

    The spread of the gain over passes, from at most ten batch means (Law and Kelton, Simulation
    Modeling and Analysis, 9.5.3), and at least the counting noise: two counts of n events differ by
    a share of sqrt(2 / n).

    Args:
        before_P: cost of each hold-out pass without the plan.
        after_P: the same with it.
        counted: recorded events of all passes: token copies on most-loaded ranks.
        launches: with tables of their own, that neighbouring passes belong to; a deployment
            has one, so the gain is as uncertain as launches differ, not their mean.
    """
    counting = CONFIDENCE_FACTOR * math.sqrt(2.0 / max(counted, 1.0))
    passes = len(before_P)
    if passes < 2:
        return counting
    batches = launches if launches > 1 else min(passes, MAX_BATCHES)
    gains = [part.mean() for part in np.array_split(1.0 - after_P / before_P, batches)]
    factor = FEW_PASSES_FACTORS[batches - 2]
    averaged = 1 if launches > 1 else batches
    return max(counting, float(factor * np.std(gains, ddof=1) / math.sqrt(averaged)))


def to_verdict(
    *,
    gain_ratio: float,
    noise_ratio: float,
    step_gain_ratio: float | None,
    left_out: Sequence[LeftOut],
    baseline_worst: Sequence[float],
    migration: MigrationCost | None,
    rebalance_s: float | None,
    saved: str = "load on the most-loaded ranks",
    loads: Loads | None = None,
    eplb_gain_ratio: float | None = None,
    eplb_noise_ratio: float = 0.0,
) -> Verdict:
    """Return the verdict on a plan, with the first reason against it, if any.

    Args:
        gain_ratio: share of the cost that the plan saves.
        noise_ratio: uncertainty of that.
        step_gain_ratio: share of a whole pass; None without a price.
        left_out: leave-one-out results.
        baseline_worst: for each of them, the worst layer's imbalance without a plan.
        migration: cost of the move; None without a current placement.
        rebalance_s: how long the placement will run; None: indefinitely.
        saved: what is saved, in words.
        loads: where the objective is not the load.
        eplb_gain_ratio: share of the same cost that EPLB's rule saves; None where a limit on moved
            experts forbids its placement.
        eplb_noise_ratio: uncertainty of the difference of both shares.
    """
    loads = loads or Loads(outcomes=(), noises=(), slack_ratio=0.0)
    fragile = _overloaded(loads) or _fragile(left_out, baseline_worst)
    reason_against = fragile or _too_small(gain_ratio, noise_ratio, step_gain_ratio, saved)
    reason_against = reason_against or _below_eplb(gain_ratio, eplb_gain_ratio, eplb_noise_ratio)
    if not reason_against and migration is not None and rebalance_s is not None:
        reason_against = _move_costs_more(migration, rebalance_s)
    word = "fragile" if fragile else "not worth it" if reason_against else "worth it"
    praise = _praise(gain_ratio, noise_ratio, step_gain_ratio, saved) + _more(loads.outcomes)
    praise += _like_eplb(gain_ratio, eplb_gain_ratio, eplb_noise_ratio)
    return Verdict(
        word=word,
        reason=reason_against or praise,
        gain_ratio=gain_ratio,
        noise_ratio=noise_ratio,
        step_gain_ratio=step_gain_ratio,
    )


def _overloaded(loads: Loads) -> str:
    for one, noise in zip(loads.outcomes, loads.noises, strict=True):
        allowed = (1.0 + loads.slack_ratio) * max(one.imbalance_before, one.imbalance_rule)
        most = min(FRAGILE_RATIO * allowed, OVERLOAD_RATIO * one.imbalance_before)
        if one.imbalance_after > max(most, (1.0 + noise) * allowed):
            return (
                f"on {one.workload!r} the most-loaded ranks carry {one.imbalance_after:.2f} times"
                f" the mean, {one.imbalance_before:.2f} without a plan and"
                f" {one.imbalance_rule:.2f} by EPLB's rule: their load is limited on the mean of"
                " the workloads; plan for fewer at once, or for less traffic_slack_ratio"
            )
    return ""


def _more(loads: Sequence[WorkloadOutcome]) -> str:
    more = max((one.imbalance_after / one.imbalance_before - 1.0 for one in loads), default=0.0)
    return (
        f"; the most-loaded ranks have up to {format_ratio(more)} more load" if more > 0.001 else ""
    )


def _fragile(left_out: Sequence[LeftOut], baseline_worst: Sequence[float]) -> str:
    for fold, worst in zip(left_out, baseline_worst, strict=True):
        if fold.traffic is not None and fold.traffic[2] > fold.traffic[0]:
            return (
                f"planned without {fold.workload!r}, its traffic becomes {fold.traffic[2]:.4g},"
                f" from {fold.traffic[0]:.4g} without a plan; record every workload that will be"
                " served"
            )
        if fold.imbalance_after > FRAGILE_RATIO * fold.imbalance_before:
            return (
                f"planned without {fold.workload!r}, its imbalance becomes"
                f" {fold.imbalance_after:.3f}, from {fold.imbalance_before:.3f} without a plan;"
                " record every workload that will be served"
            )
        if fold.worst_rank_ratio > OVERLOAD_RATIO * worst:
            return (
                f"planned without {fold.workload!r}, one rank carries"
                f" {fold.worst_rank_ratio:.2f} times the mean there, {worst:.2f} without a plan"
            )
    return ""


def _too_small(gain: float, noise: float, step_gain: float | None, saved: str) -> str:
    if gain < -noise:
        return f"{_percent(-gain)} more {saved}, beyond the noise of {_percent(noise)}"
    if gain <= noise:
        what = "gain" if gain >= 0.0 else "loss"
        return f"the {what} of {_percent(abs(gain))} is within the noise of {_percent(noise)}"
    if step_gain is not None and step_gain <= RUN_TO_RUN_RATIO:
        return (
            f"{_percent(step_gain)} of a whole pass is less than two runs of one configuration"
            f" differ by ({format_ratio(RUN_TO_RUN_RATIO, digits=0)})"
        )
    return ""


def _below_eplb(gain: float, eplb_gain: float | None, noise: float) -> str:
    if eplb_gain is None or eplb_gain - gain <= noise:
        return ""
    beyond = (
        f", {_percent(eplb_gain - gain)} more, beyond the noise of {_percent(noise)}"
        if noise
        else ""
    )
    return (
        f"EPLB's rule saves {_percent(eplb_gain)} where this saves {_percent(gain)}{beyond}; take"
        " its placement, which is among the alternatives"
    )


def _like_eplb(gain: float, eplb_gain: float | None, noise: float) -> str:
    if eplb_gain is None or eplb_gain == gain or abs(eplb_gain - gain) > noise:
        return ""
    return (
        f"; no better or worse than EPLB's rule, which saves {_percent(eplb_gain)}, within the"
        f" noise of {_percent(noise)} between the two"
    )


def _move_costs_more(migration: MigrationCost, rebalance_s: float) -> str:
    if migration.break_even_s is None or migration.break_even_s <= rebalance_s:
        return ""
    return (
        f"loading {migration.moved_experts} experts pays after {migration.break_even_s:.1f} s, the"
        f" placement runs for {rebalance_s:.1f} s"
    )


def _praise(gain: float, noise: float, step_gain: float | None, saved: str) -> str:
    whole = "" if step_gain is None else f", {format_ratio(step_gain)} of a whole pass"
    return f"{format_ratio(gain)} less {saved}{whole}; noise {_percent(noise)}"


def _percent(ratio: float) -> str:
    return format_ratio(ratio, digits=2)
