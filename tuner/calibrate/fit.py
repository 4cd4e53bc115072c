"""Fits factors on constants to measured times: damped Gauss-Newton on logarithms, with priors.

Every constant k of run c is its generic value times exp(sum of the offsets x_p that hold for c).
With r_c = log(predicted / measured), weights w_c and prior spreads t_p, minimised is

    sum_c w_c rho(r_c / noise) + sum_p (x_p / t_p)^2,   rho(z) = 2 b^2 (sqrt(1 + (z / b)^2) - 1)

rho grows like z^2 near 0 and like |z| far out, so that outliers have little influence
(pseudo-Huber, b = `BEND`). The priors shrink offsets towards 0, i.e. the generic value; an offset
of a release on top of its family's is thereby shrunk towards the family (ridge; nested offsets are
a hierarchical model).

Steps are Levenberg and Marquardt's: solve (J'WJ + priors + damping D) dx = -gradient, keep the step
if the sum falls. A run's time depends on its own constants alone, so one more pricing of all runs
with constant k moved gives that column of derivatives for every run; the number of offsets costs
nothing.

Letters: C runs, K constants, P offsets.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from tuner.arrays import Floats

Places = npt.NDArray[np.intp]

NOISE: Final = 0.06
"""Standard deviation of the logarithm of a published time: run-to-run spread of one recipe."""
BEND: Final = 2.0
"""Multiples of the noise from which on a run counts linearly."""
NUDGE: Final = 0.02
"""Difference of a constant's logarithm for numerical derivatives."""
LARGEST_STEP: Final = 0.5
"""Largest change of an offset in one iteration."""
MOST_DAMPING: Final = 1e5
REWEIGHTINGS: Final = 6
COARSE: Final = 1e-3
"""Relative decrease of the sum at which one of many fits stops."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """Constants and measured runs of one fit."""

    price: Callable[[Floats], Floats]
    """Seconds of each run from constants [K, C]."""
    generic_KC: Floats
    low_K: Floats
    high_K: Floats
    measured_C: Floats
    weight_C: Floats
    constant_P: Places
    """Index of the constant that each offset moves."""
    holds_PC: Floats
    """1 where an offset holds."""
    spread_P: Floats
    """Prior standard deviation of each offset."""
    blocks: tuple[tuple[Places, Places], ...]
    """See `group_blocks`."""
    price_side_by_side: Callable[[Sequence[Floats]], Sequence[Floats]] | None = None
    """Seconds of each run from several arrays of constants, batched."""

    def values(self, offset_P: Floats, *, aside_KC: Floats | None = None) -> Floats:
        """Return the constants of every run, their logarithms moved by `aside_KC`."""
        log_KC = np.zeros_like(self.generic_KC) if aside_KC is None else aside_KC.copy()
        for constant in np.unique(self.constant_P):
            chosen = self.constant_P == constant
            log_KC[int(constant)] += offset_P[chosen] @ self.holds_PC[chosen]
        moved: Floats = np.clip(
            self.generic_KC * np.exp(log_KC), self.low_K[:, None], self.high_K[:, None]
        )
        return moved

    def residuals(self, offset_P: Floats) -> Floats:
        """Return log(predicted / measured) of every run."""
        residual_C: Floats = np.log(self.price(self.values(offset_P)) / self.measured_C)
        return residual_C


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """Offsets, and what a refit from here needs."""

    offset_P: Floats
    residual_C: Floats
    slope_CP: Floats
    """Derivatives of the logarithms of time."""


def fit(
    problem: Problem,
    *,
    weight_C: Floats | None = None,
    start: Fit | None = None,
    iterations: int = 40,
    tolerance: float = 1e-4,
) -> Fit:
    """Fit the runs whose weight is not 0, by default the problem's, from a start or from 0."""
    weight_C = problem.weight_C if weight_C is None else weight_C
    now = start or fit_at(problem, np.zeros(len(problem.constant_P)))
    before, damping = loss(problem, now.offset_P, now.residual_C, weight_C), 1e-4
    for _ in range(iterations):
        tried_P = now.offset_P + _step(problem, now, weight_C, damping)
        tried_C = problem.residuals(tried_P)
        after = loss(problem, tried_P, tried_C, weight_C)
        if after >= before:
            damping *= 10.0
            if damping > MOST_DAMPING:
                break
            continue
        has_converged = before - after < tolerance * before
        now = Fit(offset_P=tried_P, residual_C=tried_C, slope_CP=slopes(problem, tried_P))
        before, damping = after, max(damping / 10.0, 1e-9)
        if has_converged:
            break
    return now


def refit(problem: Problem, whole: Fit, weight_C: Floats, *, is_rough: bool = False) -> Floats:
    """Fit with other weights and return log(predicted / measured) of every run.

    The start must not remember the runs that are left out: it is the minimum for the other weights
    as if times were linear in the offsets, or the generic constants where those are better. A
    rough fit ends at the former.
    """
    offset_P = _chord(problem, whole, weight_C)
    if is_rough and offset_P is not None:
        return problem.residuals(offset_P)
    start = None if offset_P is None else fit_at(problem, offset_P)
    return fit(problem, weight_C=weight_C, start=start, tolerance=COARSE).residual_C


def _chord(problem: Problem, whole: Fit, weight_C: Floats) -> Floats | None:
    """Return the minimum by the linearisation of the whole fit.

    None where the generic constants are better.
    """
    now = whole
    for _ in range(REWEIGHTINGS):
        change_P = _step(problem, now, weight_C, 1e-9)
        now = Fit(
            offset_P=now.offset_P + change_P,
            residual_C=now.residual_C + whole.slope_CP @ change_P,
            slope_CP=whole.slope_CP,
        )
    generic_P = np.zeros_like(now.offset_P)
    sums = [
        loss(problem, offset_P, problem.residuals(offset_P), weight_C)
        for offset_P in (now.offset_P, generic_P)
    ]
    return now.offset_P if sums[0] < sums[1] else None


def fit_at(problem: Problem, offset_P: Floats) -> Fit:
    """Return residuals and derivatives at given offsets."""
    return Fit(
        offset_P=offset_P,
        residual_C=problem.residuals(offset_P),
        slope_CP=slopes(problem, offset_P),
    )


def loss(problem: Problem, offset_P: Floats, residual_C: Floats, weight_C: Floats) -> float:
    """Return the sum that is minimised."""
    bent_C = np.sqrt(1.0 + (residual_C / (NOISE * BEND)) ** 2) - 1.0
    return float(
        (weight_C * 2.0 * BEND**2 * bent_C).sum() + ((offset_P / problem.spread_P) ** 2).sum()
    )


def slopes(problem: Problem, offset_P: Floats) -> Floats:
    """Return derivatives of the logarithm of time by each offset, [C, P]; 0 beyond a bound."""
    by_constant = {}
    constants = np.unique(problem.constant_P)
    values = [problem.values(offset_P)]
    for constant in constants:
        aside_KC = np.zeros_like(problem.generic_KC)
        aside_KC[constant] = -NUDGE
        values.append(problem.values(offset_P, aside_KC=aside_KC))
    if problem.price_side_by_side is None:
        here_C, *moved = map(problem.price, values)
    else:
        here_C, *moved = problem.price_side_by_side(values)
    for constant, moved_C in zip(constants, moved, strict=True):
        by_constant[constant] = np.log(here_C / moved_C) / NUDGE
    columns = [by_constant[constant] for constant in problem.constant_P]
    stacked: Floats = (np.array(columns) * problem.holds_PC).T
    return stacked


def _step(problem: Problem, now: Fit, weight_C: Floats, damping: float) -> Floats:
    bent_C = np.sqrt(1.0 + (now.residual_C / (NOISE * BEND)) ** 2)
    robust_C = weight_C / NOISE**2 / bent_C
    normal_PP = _normal(problem, now.slope_CP, robust_C)
    prior_P = 1.0 / problem.spread_P**2
    gradient_P = now.slope_CP.T @ (robust_C * now.residual_C) + prior_P * now.offset_P
    diagonal_P = np.diag(normal_PP) + prior_P
    damped_PP = normal_PP + np.diag(prior_P + damping * diagonal_P)
    change_P: Floats = np.asarray(-np.linalg.solve(damped_PP, gradient_P), dtype=np.float64)
    largest = float(np.abs(change_P).max(initial=0.0))
    return change_P * min(1.0, LARGEST_STEP / largest) if largest > 0.0 else change_P


def _normal(problem: Problem, slope_CP: Floats, weight_C: Floats) -> Floats:
    """Return J'WJ, regime by regime: the runs of one share the few offsets that hold for them."""
    normal_PP = np.zeros((slope_CP.shape[1],) * 2)
    for runs, offsets in problem.blocks:
        part = slope_CP[np.ix_(runs, offsets)]
        normal_PP[np.ix_(offsets, offsets)] += part.T @ (weight_C[runs, None] * part)
    return normal_PP


def group_blocks(holds_PC: Floats) -> tuple[tuple[Places, Places], ...]:
    """Group runs for which the same offsets hold: places of the runs, places of the offsets."""
    kinds_PU, kind_C = np.unique(holds_PC, axis=1, return_inverse=True)
    return tuple(
        (np.flatnonzero(kind_C.ravel() == kind), np.flatnonzero(kinds_PU[:, kind]))
        for kind in range(kinds_PU.shape[1])
    )
