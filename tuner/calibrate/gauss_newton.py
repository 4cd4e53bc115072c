"""Damped Gauss-Newton steps on the logarithms of a few factors, with priors of one.

    minimise  sum_i 2 (sqrt(1 + r_i(x)^2) - 1) + sum_k (x_k / s_k)^2

r_i are residuals in standard deviations of their noise; far ones count linearly (pseudo-Huber),
because one disturbed measurement must not bend all factors. Slopes are central differences.

Letters: I residuals, K factors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.prices.serve.curves import Floats

NUDGE: Final = 1e-3
"""Difference for slopes of smooth residuals."""
SMALLEST_STEP: Final = 1e-3
LARGEST_STEP: Final = 0.7
ROUNDS: Final = 60
MOST_DAMPING: Final = 1e8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fit:
    """Logarithms of factors, and how well they are known."""

    offset_K: Floats
    spread_K: Floats
    """Posterior standard deviations, each whatever the others are."""


def fit_factors(
    residuals: Callable[[Floats], Floats], prior_K: Floats, *, nudges: Sequence[float] = (NUDGE,)
) -> Fit:
    """Fit factors whose logarithms have these prior standard deviations.

    Args:
        residuals: of logarithms of factors, in standard deviations.
        prior_K: standard deviations of the logarithms.
        nudges: differences of a logarithm, either way, over which slopes are taken; a later one
            where those over the one before lead no further.
    """

    def loss(residual_I: Floats, offset_K: Floats) -> float:
        far = float(np.sum(np.sqrt(1.0 + residual_I**2) - 1.0))
        return 2.0 * far + float(np.sum((offset_K / prior_K) ** 2))

    offset_K, spread_K = np.zeros(len(prior_K)), np.zeros(len(prior_K))
    for nudge in nudges:
        damping = 1e-2
        for _ in range(ROUNDS):
            now_I = residuals(offset_K)
            weight_I = 1.0 / np.sqrt(1.0 + now_I**2)
            slope_IK = np.stack(
                [
                    (residuals(offset_K + nudge * unit_K) - residuals(offset_K - nudge * unit_K))
                    / (2.0 * nudge)
                    for unit_K in np.eye(len(prior_K))
                ],
                axis=1,
            )
            normal_KK = slope_IK.T @ (weight_I[:, None] * slope_IK) + np.diag(1.0 / prior_K**2)
            gradient_K = slope_IK.T @ (weight_I * now_I) + offset_K / prior_K**2
            now, step_K = loss(now_I, offset_K), np.zeros(len(prior_K))
            while damping <= MOST_DAMPING:
                damped_KK = normal_KK + damping * np.diag(np.diag(normal_KK))
                step_K = np.clip(
                    -np.linalg.solve(damped_KK, gradient_K), -LARGEST_STEP, LARGEST_STEP
                )
                if loss(residuals(offset_K + step_K), offset_K + step_K) < now:
                    break
                step_K, damping = 0.0 * step_K, 4.0 * damping
            offset_K, damping = offset_K + step_K, damping / 3.0
            if float(np.max(np.abs(step_K))) < SMALLEST_STEP:
                break
        spread_K = np.maximum(spread_K, np.sqrt(np.diag(np.linalg.inv(normal_KK))))
    return Fit(offset_K=offset_K, spread_K=spread_K)
