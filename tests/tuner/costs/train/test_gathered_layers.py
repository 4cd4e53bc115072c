"""What FSDP2 adds on a processor, by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuner.backtest.columns import device_hardware
from tuner.config.columns import Strategies
from tuner.config.shapes import Stages, number
from tuner.config.tune_columns import Stack, tune_columns
from tuner.costs.train.columns_of import shape_of_model
from tuner.costs.train.gathered_layers import gathered_bytes
from tuner.costs.train.step import price_step
from tuner.costs.train.units import UnitCosts, unit_costs
from tuner.devices.catalogue import find_device
from tuner.prices.datasheet import DatasheetPrices
from tuner.prices.train.constants import Constants, GemmPrecision
from tuner.spec.huggingface.read import read_model
from tuner.spec.tune import Adapters

MODELS = Path(__file__).parents[4] / "examples/profiles/epyc-lora/models"
DENSE = read_model(MODELS / "dense_512/config.json")
EXPERTS = read_model(MODELS / "qwen3_moe_512/config.json")
GPU = device_hardware(find_device("h100-sxm"), GemmPrecision.BF16)
PROCESSOR = replace(GPU, is_processor=1.0)
LAUNCH_S = 1e-5
CONSTANTS = Constants(launch_s=LAUNCH_S, fsdp_exposed_ratio=1.0)
LORA = Adapters(method="lora", rank=8, targets=("attention",), dtype="fp32")


def strategy(model: Any, **changes: Any) -> Strategies:
    usual = {"sequence": 512.0, "micro_batch": 1.0, "num_microbatches": 1.0}
    return Strategies(
        **{**usual, "data": 2.0, "zero_stage": 3.0},
        **{**tune_columns(LORA, model, Stack.TRANSFORMERS), **changes},
    )


def units(model: Any, hardware: Any, **changes: Any) -> UnitCosts:
    shape = shape_of_model(model, mtp_layers=0)
    return unit_costs(shape, strategy(model, **changes), hardware, CONSTANTS)


def test_a_tensor_is_copied_in_and_out_by_kernels_of_its_own() -> None:
    # Dense: 7 matrices and 2 norms; experts: 4 matrices, 4 norms, router, 2 stacks. Four adapters
    # of two tensors; with those of the experts six.
    for model, targets, kind, present, adapters in (
        (DENSE, ("attention",), "dense", 9, 8),
        (EXPERTS, ("attention",), "moe", 11, 8),
        (EXPERTS, ("attention", "mlp"), "moe", 11, 12),
    ):
        tune = tune_columns(LORA.model_copy(update={"targets": targets}), model, Stack.TRANSFORMERS)
        cost = getattr(units(model, PROCESSOR, **tune), kind)
        assert number(cost.gather_launch_s) == pytest.approx(2 * (present + adapters) * LAUNCH_S)
        assert number(cost.reduce_launch_s) == pytest.approx(2 * adapters * LAUNCH_S)
        assert number(cost.update_launch_s) == pytest.approx(11 * adapters * LAUNCH_S)
        size = 2.0 * (cost.parameters + cost.expert_parameters)
        size = size + 4.0 * (cost.trained + cost.expert_trained)
        copied_s = DatasheetPrices(hardware=PROCESSOR, constants=CONSTANTS)
        moved = np.asarray(cost.copied_s) * copied_s.hardware.memory_bytes_per_s
        assert number(moved) == pytest.approx(2.0 * number(size) * CONSTANTS.memory_factor)


def test_accelerators_and_other_engines_have_none() -> None:
    for found in (units(DENSE, GPU), units(DENSE, PROCESSOR, eager_modules=0.0)):
        for one in (found.dense, found.head):
            assert not number(one.copied_s + one.gather_launch_s + one.update_launch_s)


def test_layers_are_gathered_in_both_passes_and_the_outermost_module_once() -> None:
    def step_s(link: float) -> float:
        one, slow = np.ones((1, 1)), replace(PROCESSOR, scale_up_bytes_per_s=link)
        stages = Stages(
            dense_SC=6.0 * one,
            moe_SC=0.0 * one,
            embedding_SC=one,
            head_SC=one,
            mtp_SC=0.0 * one,
        )
        shape = shape_of_model(DENSE, mtp_layers=0)
        return number(price_step(shape, strategy(DENSE), slow, CONSTANTS, stages).step_s)

    layer = 2 * 512 * 512 + 2 * 512 * 256 + 3 * 512 * 1536
    adapters = 8 * (2 * (512 + 512) + 2 * (512 + 256))
    gathered = 6 * 2 * (2 * layer + 4 * adapters) + 2 * 2 * 4096 * 512
    reduced = 6 * 4 * adapters
    # Half of it stays on its rank; 1 / 1e9 - 1 / 2e9 seconds a byte.
    seconds = 0.5 * (gathered + reduced) / CONSTANTS.scale_up_ratio * 0.5e-9
    assert step_s(1e9) - step_s(2e9) == pytest.approx(seconds, rel=1e-6)


def test_adapters_are_gathered_beside_frozen_weights_in_their_own_type() -> None:
    assert number(gathered_bytes(strategy(DENSE), 100.0, 10.0)) == 240.0
    full = Strategies(sequence=512.0, micro_batch=1.0, num_microbatches=1.0, eager_modules=1.0)
    assert number(gathered_bytes(full, 100.0, 100.0)) == 200.0
