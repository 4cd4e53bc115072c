"""Savings of a plan with their uncertainty, and the verdict: worth it or not.

    W workloads   P hold-out passes, or batches of hold-out tokens

Savings are in seconds of the expert layers where they are priced, in traffic where that is the
objective and nothing is priced, otherwise in load of the most-loaded ranks. The noise of the
workloads' mean is the root sum of squares, each weighted by its share of the cost; under static
dispatch, where all workloads run on one launch's tables, it is the sum.

A gain counts if it exceeds its variation from pass to pass, or from launch to launch where a rule
draws tables, and, as a share of a whole pass, the difference between two runs
of one configuration. A plan that saves less than EPLB's rule, beyond the noise of that difference,
is not recommended, unless it keeps a limit on moved experts, which EPLB does not. A plan that is
worse than no change on a workload it was not made from, or overloads a rank there, is fragile,
whatever it gains on its own workloads.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from solvers.placement.ranks import Floats
from tuner.costs.place import rest_s
from tuner.plans.place import LeftOut, MigrationCost, Verdict, WorkloadOutcome
from tuner.search.place.cost import WorkloadCost
from tuner.search.place.problem import PlaceProblem
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

Compared = tuple[WorkloadCost, WorkloadCost, WorkloadCost]
"""Hold-out costs of a workload under the current placement, EPLB's and the plan's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """Shares of the cost without the plan."""

    gain_ratio: float
    noise_ratio: float
    step_gain_ratio: float | None = None
    """Share of a whole pass's seconds that is saved; None where nothing is priced."""
    saved: str = "load on the most-loaded ranks"
    """Name of the saved quantity."""
    eplb_gain_ratio: float | None = None
    """Share of the cost that EPLB's rule saves; None where a limit on moved experts forbids it."""
    eplb_noise_ratio: float = 0.0
    """Uncertainty of the difference from it, both on the same passes."""


def gain_of(problem: PlaceProblem, compared: Sequence[Compared]) -> Gain:
    """Return what the plan saves on the hold-out passes of all workloads."""
    weights = [workload.weight_ratio for workload in problem.evidence]
    values = np.array([[cost.value for cost in costs] for costs in compared])
    before, eplb, after = (float(np.dot(weights, value_W)) for value_W in values.T)
    noise, eplb_noise = (
        _noise_of_mean(weights, values[:, at], compared, against=at) for at in (0, 1)
    )
    share = eplb / before if before > 0.0 else 1.0
    gain_ratio = 1.0 - after / before if before > 0.0 else 0.0
    is_traffic = compared[0][0].traffic is not None
    step_gain_ratio = None
    if problem.pricing is not None and compared[0][0].seconds is not None:
        machine, goal = problem.pricing.machine, problem.spec.goal
        # Assume that layers without a recording are as imbalanced as the recorded ones.
        layers_s = machine.model.num_moe_layers / len(problem.spec.layer_ids) * before
        tokens_W = [
            float(workload.holdout_PLE.sum(axis=2).mean()) / machine.moe.computed_top_k
            for workload in problem.evidence
        ]
        context, decodes = float(goal.context_tokens), goal.phase == "decode"
        rest_W = [
            rest_s(machine, tokens=tokens, context_tokens=context, decodes=decodes)
            for tokens in tokens_W
        ]
        step_gain_ratio = gain_ratio * layers_s / (float(np.dot(weights, rest_W)) + layers_s)
    unpriced = "traffic" if is_traffic else "load on the most-loaded ranks"
    return Gain(
        gain_ratio=gain_ratio,
        noise_ratio=noise,
        step_gain_ratio=step_gain_ratio,
        saved=unpriced if step_gain_ratio is None else "time in the expert layers",
        eplb_gain_ratio=1.0 - share if problem.migration is None else None,
        eplb_noise_ratio=eplb_noise * share,
    )


def _noise_of_mean(
    weights: Sequence[float], value_W: Floats, compared: Sequence[Compared], *, against: int
) -> float:
    """Return the noise of the workloads' mean gain over the current placement's or EPLB's cost."""
    noises = [
        gain_noise(
            costs[against].value_P,
            costs[2].value_P,
            counted=costs[2].events,
            launches=costs[2].loads.num_launches,
        )
        for costs in compared
    ]
    shares = np.array(weights) * value_W
    is_shared = any(costs[2].loads.num_launches > 1 for costs in compared)
    total = float(shares.sum())
    return float(np.linalg.norm(shares * noises, 1 if is_shared else 2)) / total if total else 0.0


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
    gain: Gain,
    *,
    left_out: Sequence[LeftOut] = (),
    migration: MigrationCost | None = None,
    rebalance_s: float | None = None,
    loads: Sequence[tuple[WorkloadOutcome, float]] = (),
    slack_ratio: float = 0.0,
) -> Verdict:
    """Return the verdict on a plan, with the first reason against it, if any.

    Args:
        gain: what the plan saves, and EPLB's rule.
        left_out: leave-one-out results.
        migration: cost of the move; None without a current placement.
        rebalance_s: how long the placement will run; None: indefinitely.
        loads: where the objective is not the load, that of each workload and its noise.
        slack_ratio: load above EPLB's that the goal allows.
    """
    fragile = next(_overloads(loads, slack_ratio), None) or next(_unseen_losses(left_out), None)
    against = fragile or next(_shortcomings(gain, migration, rebalance_s), None)
    return Verdict(
        word="fragile" if fragile else "not worth it" if against else "worth it",
        reason=against or _praise(gain, loads),
        gain_ratio=gain.gain_ratio,
        noise_ratio=gain.noise_ratio,
        step_gain_ratio=gain.step_gain_ratio,
    )


def _overloads(loads: Sequence[tuple[WorkloadOutcome, float]], slack_ratio: float) -> Iterator[str]:
    for outcome, noise in loads:
        allowed = (1.0 + slack_ratio) * max(outcome.imbalance_before, outcome.imbalance_rule)
        limit = min(FRAGILE_RATIO * allowed, OVERLOAD_RATIO * outcome.imbalance_before)
        if outcome.imbalance_after > max(limit, (1.0 + noise) * allowed):
            yield (
                f"on {outcome.workload!r} the most-loaded ranks carry {outcome.imbalance_after:.2f}"
                f" times the mean, {outcome.imbalance_before:.2f} without a plan and"
                f" {outcome.imbalance_rule:.2f} by EPLB's rule: their load is limited on the mean"
                " of the workloads; plan for fewer at once, or for less traffic_slack_ratio"
            )


def _unseen_losses(left_out: Sequence[LeftOut]) -> Iterator[str]:
    for fold in left_out:
        without = f"planned without {fold.workload!r},"
        record = "record every workload that will be served"
        if fold.traffic is not None and fold.traffic[2] > fold.traffic[0]:
            yield (
                f"{without} its traffic becomes {fold.traffic[2]:.4g},"
                f" from {fold.traffic[0]:.4g} without a plan; {record}"
            )
        if fold.imbalance_after > FRAGILE_RATIO * fold.imbalance_before:
            yield (
                f"{without} its imbalance becomes {fold.imbalance_after:.3f}, from"
                f" {fold.imbalance_before:.3f} without a plan; {record}"
            )
        worst = fold.worst_rank_ratio_before
        if worst is not None and fold.worst_rank_ratio > OVERLOAD_RATIO * worst:
            yield (
                f"{without} one rank carries {fold.worst_rank_ratio:.2f} times the mean there,"
                f" {worst:.2f} without a plan"
            )


def _shortcomings(
    gain: Gain, migration: MigrationCost | None, rebalance_s: float | None
) -> Iterator[str]:
    saved, noise = gain.gain_ratio, gain.noise_ratio
    if saved < -noise:
        yield f"{_percent(-saved)} more {gain.saved}, beyond the noise of {_percent(noise)}"
    if saved <= noise:
        what = "gain" if saved >= 0.0 else "loss"
        yield f"the {what} of {_percent(abs(saved))} is within the noise of {_percent(noise)}"
    if gain.step_gain_ratio is not None and gain.step_gain_ratio <= RUN_TO_RUN_RATIO:
        yield (
            f"{_percent(gain.step_gain_ratio)} of a whole pass is less than two runs of one"
            f" configuration differ by ({format_ratio(RUN_TO_RUN_RATIO, digits=0)})"
        )
    eplb, eplb_noise = gain.eplb_gain_ratio, gain.eplb_noise_ratio
    if eplb is not None and eplb - saved > eplb_noise:
        more = f", {_percent(eplb - saved)} more, beyond the noise of {_percent(eplb_noise)}"
        yield (
            f"EPLB's rule saves {_percent(eplb)} where this saves {_percent(saved)}"
            f"{more if eplb_noise else ''}; take its placement, which is among the alternatives"
        )
    pays_s = None if migration is None else migration.break_even_s
    if migration and pays_s is not None and rebalance_s is not None and pays_s > rebalance_s:
        yield (
            f"loading {migration.moved_experts} experts pays after {pays_s:.1f} s, the placement"
            f" runs for {rebalance_s:.1f} s"
        )


def _praise(gain: Gain, loads: Sequence[tuple[WorkloadOutcome, float]]) -> str:
    step, eplb, noise = gain.step_gain_ratio, gain.eplb_gain_ratio, gain.eplb_noise_ratio
    praise = f"{format_ratio(gain.gain_ratio)} less {gain.saved}"
    praise += "" if step is None else f", {format_ratio(step)} of a whole pass"
    praise += f"; noise {_percent(gain.noise_ratio)}"
    more = max(
        (outcome.imbalance_after / outcome.imbalance_before - 1.0 for outcome, _ in loads),
        default=0.0,
    )
    if more > 0.001:
        praise += f"; the most-loaded ranks have up to {format_ratio(more)} more load"
    if eplb is not None and eplb != gain.gain_ratio and abs(eplb - gain.gain_ratio) <= noise:
        praise += (
            f"; no better or worse than EPLB's rule, which saves {_percent(eplb)}, within the"
            f" noise of {_percent(noise)} between the two"
        )
    return praise


def _percent(ratio: float) -> str:
    return format_ratio(ratio, digits=2)
