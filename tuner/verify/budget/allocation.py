"""Chooses the most valuable set of trials that fits the rest of the budget, exactly.

The value of a trial is the expected saving: with beliefs mean m_j and covariance C over the steps
of the candidates, a trial x moves the means along one line, m + b z with z standard normal and
b_j = C_jx / sqrt(C_xx + noise^2), so that it saves

    w(x) = min_j m_j - E_z min_j (m_j + b_j z)        seconds of a step

by changing the choice (Frazier, Powell, Dayanik, "The knowledge-gradient policy for correlated
normal beliefs", INFORMS J. Computing 21(4), 2009). The expectation is taken at 255 quantiles of z.
To check the plan's prediction too, w includes a hundredth of the reduction of the standard
deviation of the best candidate's step; that decides if there is only one candidate.

Each candidate gets one scale or none, so the best set is a multiple-choice knapsack (Kellerer,
Pferschy, Pisinger, Knapsack Problems, 2004, ch. 11): an exact dynamic program over the budget in
steps of its 1/500, costs rounded up so that the set never exceeds it, and over the number of
trials. Values of a set are added, which ignores correlations between its trials; only its most
valuable trial is started, and the rest is decided again once that has ended.

Letters: J candidates, X possible trials.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats
from tuner.verify.budget.extrapolation import Belief

QUANTILES: Final = np.array([NormalDist().inv_cdf((one + 0.5) / 255) for one in range(255)])
PROMISE: Final = 0.01
STEPS: Final = 500
"""Of the budget, in the dynamic program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A possible trial."""

    group: int
    """Its candidate; a set has at most one item of each."""
    cost_s: float
    value: float


def values_X(
    belief: Belief, *, candidates: Sequence[int], trials: Sequence[int], noise_s: Sequence[float]
) -> Floats:
    """Return the value of each trial, in seconds of a step.

    Args:
        belief: about full-scale jobs and trials together.
        candidates: indices of the full-scale jobs in it.
        trials: indices of the trials.
        noise_s: standard error of each trial's step.
    """
    mean_J = belief.mean_s_T[list(candidates)]
    covariance = belief.covariance_TT
    best = int(np.argmin(mean_J))
    before_s = math.sqrt(max(0.0, float(covariance[candidates[best], candidates[best]])))
    value_X = np.zeros(len(trials))
    for place, (trial, noise) in enumerate(zip(trials, noise_s, strict=True)):
        spread = math.sqrt(float(covariance[trial, trial]) + noise**2)
        line_J = covariance[list(candidates), trial] / spread if spread > 0.0 else 0.0 * mean_J
        after_s = np.min(mean_J[:, None] + np.outer(line_J, QUANTILES), axis=0).mean()
        left_s = math.sqrt(max(0.0, before_s**2 - float(line_J[best]) ** 2))
        value_X[place] = max(0.0, mean_J[best] - after_s) + PROMISE * (before_s - left_s)
    return value_X


def best_set(items: Sequence[Item], *, budget_s: float, most: int) -> tuple[int, ...]:
    """Return the indices of the most valuable items whose total cost fits the budget.

    Args:
        items: of all groups.
        budget_s: finite or infinite.
        most: items of a set.
    """
    groups: dict[int, list[int]] = {}
    for place, item in enumerate(items):
        if item.cost_s <= budget_s and item.value > 0.0:
            groups.setdefault(item.group, []).append(place)
    most = min(most, len(groups))
    if most < 1:
        return ()
    every_s = sum(max(items[place].cost_s for place in places) for places in groups.values())
    # If the budget covers every item of every group, rounding up must not exclude one.
    enough_s = every_s * STEPS / max(1, STEPS - len(groups))
    grain_s = min(budget_s, enough_s) / STEPS
    # value[n, c]: best of n items at most with c grains; came[g][n, c]: which item of group g.
    value = np.zeros((most + 1, STEPS + 1))
    came = []
    for places in groups.values():
        value, chosen = _with_group(value, [items[place] for place in places], grain_s)
        came.append(chosen)
    return _traced(items, list(groups.values()), came, grain_s)


def _with_group(
    value: Floats, items: Sequence[Item], grain_s: float
) -> tuple[Floats, npt.NDArray[np.int64]]:
    best, chosen = value.copy(), np.full(value.shape, -1, dtype=np.int64)
    for place, item in enumerate(items):
        grains = _grains(item, grain_s)
        if grains > STEPS:
            continue
        with_item = value[:-1, : STEPS + 1 - grains] + item.value
        better = with_item > best[1:, grains:]
        best[1:, grains:] = np.where(better, with_item, best[1:, grains:])
        chosen[1:, grains:] = np.where(better, place, chosen[1:, grains:])
    return best, chosen


def _traced(
    items: Sequence[Item],
    groups: Sequence[Sequence[int]],
    came: Sequence[npt.NDArray[np.int64]],
    grain_s: float,
) -> tuple[int, ...]:
    chosen_items = []
    number, left = came[-1].shape[0] - 1, STEPS
    for places, chosen in zip(reversed(groups), reversed(came), strict=True):
        place = int(chosen[number, left])
        if place >= 0:
            chosen_items.append(places[place])
            number, left = number - 1, left - _grains(items[places[place]], grain_s)
    return tuple(sorted(chosen_items))


def _grains(item: Item, grain_s: float) -> int:
    """Cost in grains, rounded up, except for rounding errors."""
    return math.ceil(item.cost_s / grain_s - 1e-9) if grain_s > 0.0 else 0
