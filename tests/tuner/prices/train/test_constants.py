import numpy as np
import pytest

from tests.rows import each_row
from tuner.config.shapes import stacked, taken
from tuner.costs.train.columns_of import matmul_share
from tuner.devices.catalogue import find_device
from tuner.devices.datasheet import Generation
from tuner.prices.train.constants import FITTED, NAMES, GemmPrecision, Software, uncalibrated


@each_row("generation", list(Generation))
@each_row("precision", list(GemmPrecision))
@each_row("software", list(Software))
def test_every_device_type_and_software_has_values_inside_the_bounds(
    generation: Generation, precision: GemmPrecision, software: Software
) -> None:
    constants = uncalibrated(generation, precision=precision, software=software)
    for name, prior in FITTED.items():
        assert prior.low <= getattr(constants, name) <= prior.high, name


def test_every_constant_may_be_fitted() -> None:
    assert sorted(FITTED) == sorted(NAMES)
    assert all(prior.spread > 0.0 and prior.low < prior.high for prior in FITTED.values())


def test_narrower_types_reach_less_of_their_peak() -> None:
    reached = [
        matmul_share(find_device("b200-sxm"), precision)
        * float(
            uncalibrated(
                Generation.BLACKWELL, precision=precision, software=Software.MEGATRON_2026
            ).matmul_ratio
        )
        for precision in (GemmPrecision.BF16, GemmPrecision.NVFP4)
    ]
    assert reached[1] < reached[0]


def test_constants_stack_to_columns_and_are_taken_like_strategies() -> None:
    parts = [
        uncalibrated(generation, precision=GemmPrecision.BF16, software=Software.MEGATRON_2025)
        for generation in (Generation.AMPERE, Generation.HOPPER)
    ]
    columns = stacked(parts)
    assert columns.matmul_ratio == pytest.approx([0.932, 0.806])
    assert taken(columns, np.array([1])).matmul_ratio == pytest.approx([0.806])
