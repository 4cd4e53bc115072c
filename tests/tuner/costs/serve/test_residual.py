"""What launches say of an engine, for later plans."""

import math

import numpy as np
import pytest

from tests.expect import present
from tuner.costs.serve.residual import LEAST_SPREAD, LatencyResidual, latency_residual


def test_the_factor_is_the_mean_and_adds_to_what_was_corrected_before() -> None:
    first = fitted([1.1, 1.3])
    assert first.factor == pytest.approx(math.sqrt(1.1 * 1.3))
    again = fitted([0.95, 1.0 / 0.95], first)
    assert again.factor == pytest.approx(first.factor)
    assert first.band.around(2.0) == pytest.approx((2.0 / first.spread, 2.0 * first.spread))


def fitted(ratios: list[float], prior: LatencyResidual | None = None) -> LatencyResidual:
    return present(latency_residual(ratios, prior=prior))


def test_equal_ratios_leave_the_noise_of_repeats() -> None:
    assert fitted([1.2, 1.2, 1.2]).spread == LEAST_SPREAD
    assert latency_residual([1.0, 2000.0], prior=None) is None


@pytest.mark.parametrize("launches", [2, 3, 6, 14])
def test_bands_hold_about_four_of_five_new_deployments(launches: int) -> None:
    rng, held = np.random.default_rng(3), []
    for _ in range(600):
        seen, new = np.exp(0.15 * rng.normal(size=launches)), float(np.exp(0.15 * rng.normal()))
        residual = fitted(seen.tolist())
        low, high = residual.band.around(residual.factor)
        held.append(low <= new <= high)
    assert 0.74 < sum(held) / len(held) < 0.86
