"""What launches say of an engine, for later plans."""

import math
from typing import cast

import numpy as np
import pytest

from tests.expect import present
from tuner.costs.serve.residual import LEAST_SPREAD, LatencyResidual, Metric, latency_residual


def fitted(ratios: list[float], before: LatencyResidual | None = None) -> LatencyResidual:
    return present(latency_residual(ratios, metric="tpot", before=before))


def test_launches_count_for_more_the_more_there_are_and_the_better_they_agree() -> None:
    factors = [fitted([1.2] * launches).factor for launches in (1, 2, 4, 40)]
    assert factors == sorted(factors)
    assert factors[0] == pytest.approx(math.sqrt(1.2))
    assert factors[-1] == pytest.approx(1.2, rel=0.01)
    spreads = [fitted([1.2] * launches).spread for launches in (1, 2, 4, 40)]
    assert spreads == sorted(spreads, reverse=True)
    assert fitted([0.9, 1.6]).spread > fitted([1.2, 1.2]).spread
    # Repeats of one launch differ.
    assert fitted([1.0] * 1000).spread == LEAST_SPREAD
    assert latency_residual([2000.0], metric="tpot", before=None) is None


def test_a_worked_example() -> None:
    # Logarithms -0.1, 0.1 and 1.0, an outlier: their median is 0.1, three of four launches' worth.
    ratios = np.exp([-0.1, 0.1, 1.0]).tolist()
    for metric, usual in (("ttft", 0.2), ("tpot", 0.1)):
        fit = present(latency_residual(ratios, metric=cast("Metric", metric), before=None))
        assert fit.factor == pytest.approx(math.exp(0.075))
        # 2 usual^2 + (0.04 + 0 + 0.81) + 3 / 4 * 0.01 over 5 degrees, times 1 + 1 / 4.
        scale = math.sqrt(1.25 * (2.0 * usual**2 + 0.85 + 0.0075) / 5.0)
        assert fit.spread == pytest.approx(math.exp(1.476 * scale))


def test_what_a_corrected_plan_shows_adds_to_its_correction() -> None:
    first = fitted([1.1, 1.3])
    assert fitted([0.95, 1.0 / 0.95], first).factor == pytest.approx(first.factor)
    assert first.band.around(2.0) == pytest.approx((2.0 / first.spread, 2.0 * first.spread))


@pytest.mark.parametrize("launches", [1, 2, 3, 6, 14])
def test_bands_hold_about_four_of_five_new_deployments(launches: int) -> None:
    # Engines differ by 0.25, deployments of an engine by 0.15, which the prior does not know.
    rng, held = np.random.default_rng(3), []
    for _ in range(600):
        mean = 0.25 * rng.normal()
        seen, new = np.exp(mean + 0.15 * rng.normal(size=launches)), mean + 0.15 * rng.normal()
        residual = fitted(seen.tolist())
        low, high = residual.band.around(residual.factor)
        held.append(low <= math.exp(new) <= high)
    assert 0.70 < sum(held) / len(held) < 0.90
