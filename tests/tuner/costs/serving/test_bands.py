"""Bands around predictions."""

from typing import get_args

import pytest

from tuner.costs.serving.bands import Band, bands_of
from tuner.costs.serving.engine import Engine
from tuner.spec.serving.goal import Mode


def test_a_band_is_seconds_around_a_prediction() -> None:
    assert Band(low_ratio=0.5, high_ratio=3.0).around(2.0) == (1.0, 6.0)


@pytest.mark.parametrize("engine", list(Engine))
def test_bands_from_kernels_hold_the_prediction_itself(engine: Engine) -> None:
    for mode in get_args(Mode):
        for band in bands_of(engine, mode=mode, has_kernels=True):
            assert band.low_ratio < 1.0 < band.high_ratio


@pytest.mark.parametrize("engine", list(Engine))
@pytest.mark.parametrize("mode", get_args(Mode))
def test_what_is_predicted_from_datasheets_is_told_to_take_longer(
    engine: Engine, mode: Mode
) -> None:
    from_kernels = bands_of(engine, mode=mode, has_kernels=True)
    from_sheet = bands_of(engine, mode=mode, has_kernels=False)
    for kernels, sheet in zip(from_kernels, from_sheet, strict=True):
        assert sheet.high_ratio > kernels.high_ratio


@pytest.mark.parametrize("engine", list(Engine))
def test_shared_devices_are_less_certain_than_whole_ones(engine: Engine) -> None:
    whole = bands_of(engine, mode="aggregated", has_kernels=True)
    shared = bands_of(engine, mode="shared_device", has_kernels=True)
    for one, other in zip(whole, shared, strict=True):
        assert other.low_ratio < one.low_ratio
        assert other.high_ratio > one.high_ratio
