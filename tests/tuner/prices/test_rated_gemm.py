"""A kernel has one price, whoever asks for it."""

from dataclasses import replace

import numpy as np
import pytest

from tuner.costs.train.columns_of import hardware_of_pool
from tuner.devices.catalogue import find_device
from tuner.prices import datasheet
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.ops import gemm
from tuner.prices.rated_gemm import rated_gemm_s
from tuner.prices.serve import machine
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.train.constants import Constants, GemmPrecision
from tuner.search.place.prices import place_pool
from tuner.spec.cluster import Cluster, Pool
from tuner.spec.place import PlaceGoal

SHAPE = (4096.0, 7168.0, 7168.0)
GOAL = PlaceGoal.model_validate(
    {"kind": "place", "ranks": 8, "workloads": [{"name": "w", "path": "chat.json"}]}
)


def test_training_placement_and_serving_price_a_gemm_alone_by_one_function() -> None:
    asking = (datasheet, machine)
    assert all(vars(module)["rated_gemm_s"] is rated_gemm_s for module in asking)
    for name, expected_s in (("b200-sxm", 246e-6), ("h200-sxm", 477e-6)):
        sheet, pool = find_device(name), Pool(name="p", device=name, devices_per_node=8)
        served_s = ServingMachine(sheet=sheet, tables=None, engines={}).seconds(
            gemm(*SHAPE, dtype="bf16")
        )
        hardware = hardware_of_pool(sheet, pool, precision=GemmPrecision.BF16)
        trained = DatasheetPrices(hardware=hardware, constants=Constants())
        placed = place_pool(Cluster(pools=(pool,)), GOAL).prices
        assert isinstance(placed, DatasheetPrices)
        alone = replace(placed, constants=Constants())
        seconds = [float(prices.seconds(gemm(*SHAPE))) for prices in (trained, alone)]
        assert seconds == pytest.approx([float(served_s)] * 2, rel=1e-12)
        assert seconds[0] == pytest.approx(expected_s, rel=0.01)
        # What a step adds is the stack's: less of the rate alone, under the power limit.
        assert float(np.ravel(placed.seconds(gemm(*SHAPE)))[0]) > seconds[0]
