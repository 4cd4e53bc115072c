import math

import pytest

from tests.benchmarks.unrecorded_layers import errors
from tuner.spec.routing import RoutingRecord


def skewed(largest: float) -> tuple[float, ...]:
    return (largest, *[(1.0 - largest) / 3] * 3)


def test_each_layer_is_predicted_from_the_others() -> None:
    rows = (skewed(0.25), skewed(0.5), skewed(1.0))
    record = RoutingRecord(name="r", num_experts=4, layer_ids=(0, 1, 9), load_ratios=rows)
    # EP 4 only: imbalances 1, 2 and 4. Nearest: 2, 1, 2; means: 3, 2.5, 1.5.
    nearest, mean = zip(*errors(record), strict=True)
    assert nearest == pytest.approx([math.log(2.0), math.log(2.0), math.log(2.0)])
    assert mean == pytest.approx([math.log(3.0), math.log(1.25), math.log(4.0 / 1.5)])


def test_two_layers_say_nothing() -> None:
    rows = (skewed(0.25), skewed(0.5))
    record = RoutingRecord(name="r", num_experts=4, layer_ids=(0, 1), load_ratios=rows)
    assert not list(errors(record))
