"""Bands around predictions."""

import pytest

from tuner.costs.serving.bands import TPOT, TTFT, Band
from tuner.costs.serving.engine import Engine


def test_a_band_is_seconds_around_a_prediction() -> None:
    assert Band(low_ratio=0.5, high_ratio=3.0).around(2.0) == (1.0, 6.0)


@pytest.mark.parametrize("engine", list(Engine))
def test_every_engine_has_bands_that_hold_the_prediction_itself(engine: Engine) -> None:
    for band in (TPOT[engine], TTFT[engine]):
        assert band.low_ratio < 1.0 < band.high_ratio
