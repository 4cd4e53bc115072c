"""Passes of the training side."""

from dataclasses import replace

import numpy as np
import pytest

from tests.tuner.models import example_model
from tuner.backtest.columns import device_hardware
from tuner.backtest.stages import stage_columns
from tuner.config.columns import Strategies
from tuner.costs.rl.packing import MicroBatches
from tuner.costs.rl.trainer import Trainer
from tuner.costs.train.columns_of import shape_of_model
from tuner.costs.train.memory_constants import memory_constants
from tuner.devices.catalogue import find_device
from tuner.prices.train.constants import GemmPrecision, Software, uncalibrated

MICRO = MicroBatches(count=8, tokens=4096.0, sequence_tokens=2048.0)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    shape = shape_of_model(example_model("llama-3.1-8b"), mtp_layers=0)
    sheet = find_device("h100-sxm")
    software = Software.MEGATRON_2025
    return Trainer(
        shape=shape,
        strategy=Strategies(sequence=1.0, micro_batch=1.0, num_microbatches=1.0, data=8.0),
        hardware=device_hardware(sheet, GemmPrecision.BF16),
        constants=uncalibrated(sheet.generation, precision=GemmPrecision.BF16, software=software),
        memory_constants=memory_constants([software], families=["nemo"]),
        stages=stage_columns(shape, (32,)),
    )


def test_a_forward_pass_is_about_a_third_of_an_update(trainer: Trainer) -> None:
    assert 0.2 < trainer.forward_s(MICRO) / trainer.update_s(MICRO) < 0.4
    recomputed = replace(trainer, strategy=replace(trainer.strategy, recompute_full=1.0))
    assert recomputed.update_s(MICRO) > trainer.update_s(MICRO)
    assert recomputed.forward_s(MICRO) == pytest.approx(trainer.forward_s(MICRO))


def test_forward_passes_fill_the_pipeline(trainer: Trainer) -> None:
    strategy = replace(trainer.strategy, data=4.0, pipeline=2.0)
    piped = replace(trainer, strategy=strategy, stages=stage_columns(trainer.shape, (16, 16)))
    stage_s_S = piped.price(MICRO).forward_s_SC[:, 0]
    boundary_s = float(np.ravel(piped.price(MICRO).boundary_s)[0])
    # All micro-batches on the slower stage, one on the other, one crossing.
    by_hand = MICRO.count * stage_s_S.max() + stage_s_S.min() + boundary_s
    assert piped.forward_s(MICRO) == pytest.approx(by_hand)


def test_the_network_is_the_link_beyond_one_domain(trainer: Trainer) -> None:
    machine = trainer.hardware
    assert trainer.link_bytes_per_s == machine.scale_up_bytes_per_s
    wide = replace(trainer, strategy=replace(trainer.strategy, data=16.0))
    assert wide.link_bytes_per_s == machine.scale_out_bytes_per_s
    assert (trainer.devices, trainer.data_ranks) == (8, 8)
