"""Memory at three moments, by what stays on the devices."""

from dataclasses import replace

import pytest

from tests.tuner.decoders import LLAMA_8B
from tests.tuner.models import example_model
from tuner.backtest.columns import device_hardware
from tuner.backtest.stages import stage_columns
from tuner.config.columns import Strategies
from tuner.costs.rl.packing import MicroBatches
from tuner.costs.rl.trainer import Trainer
from tuner.costs.serve.decoder import Formats
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.train.columns_of import shape_of_model
from tuner.costs.train.memory_constants import memory_constants
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.train.constants import GemmPrecision, Software, uncalibrated
from tuner.simulate.rl.memory import Residency, RlMemory, moved_bytes, price_memory_of_step
from tuner.simulate.rl.rollout import RolloutSide
from tuner.simulate.rl.step import RlPlacement

MICRO = MicroBatches(count=8, tokens=4096.0, sequence_tokens=2048.0)
PARAMETERS = 8.03e9
OFFLOADED = Residency(
    offloads_weights=True,
    offloads_optimizer=True,
    offloads_reference=True,
    has_reference=True,
    bucket_bytes=1e9,
)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    shape = shape_of_model(example_model("llama-3.1-8b"), mtp_layers=0)
    sheet, software = find_device("h100-sxm"), Software.MEGATRON_2025
    return Trainer(
        shape=shape,
        strategy=Strategies(
            sequence=1.0, micro_batch=1.0, num_microbatches=1.0, data=8.0, recompute_full=1.0
        ),
        hardware=device_hardware(sheet, GemmPrecision.BF16),
        constants=uncalibrated(sheet.generation, precision=GemmPrecision.BF16, software=software),
        memory_constants=memory_constants([software], families=["nemo"]),
        stages=stage_columns(shape, (32,)),
    )


@pytest.fixture(scope="module")
def side() -> RolloutSide:
    sheet = find_device("h100-sxm")
    return RolloutSide(
        iteration=Iteration(
            decoder=LLAMA_8B,
            formats=Formats(attention="bf16", output="bf16", ffn="bf16", experts="bf16", kv="bf16"),
            degrees=InstanceDegrees(),
            traits=ENGINE_TRAITS["vllm"],
            machine=ServingMachine(sheet=sheet, tables=None, engines=ENGINE_TRAITS),
        ),
        instances=8,
        step_tokens=8192,
        most_running=256,
        memory_ratio=0.6,
        memory_bytes=float(sheet.memory_bytes),
    )


def priced(
    trainer: Trainer,
    side: RolloutSide,
    residency: Residency,
    placement: RlPlacement = RlPlacement.COLOCATED,
) -> RlMemory:
    return price_memory_of_step(
        trainer,
        MICRO,
        side,
        residency,
        placement=placement,
        longest=4096,
        devices_per_node=8,
    )


def test_what_is_offloaded_leaves_the_device_for_the_host(
    trainer: Trainer, side: RolloutSide
) -> None:
    stays, leaves = priced(trainer, side, Residency()), priced(trainer, side, OFFLOADED)
    weights = stays.device["rollout"]["trainer's weights"]
    # bf16 weights and fp32 gradients of a replica.
    assert weights == pytest.approx(6.0 * PARAMETERS, rel=0.02)
    assert "trainer's weights" not in leaves.device["rollout"]
    assert not stays.host
    # A node has eight replicas of the weights, which are not sharded, and one of the optimizer.
    assert leaves.host["trainer's weights"] == pytest.approx(8 * 2 * PARAMETERS, rel=0.02)
    assert leaves.host["reference"] == leaves.host["trainer's weights"]
    assert leaves.host["optimizer between updates"] == pytest.approx(12 * PARAMETERS, rel=0.02)


def test_a_switch_holds_both_weights_and_no_cache(trainer: Trainer, side: RolloutSide) -> None:
    moment = priced(trainer, side, OFFLOADED).device["switch"]
    assert moment["engine's weights"] == pytest.approx(2.0 * PARAMETERS, rel=0.1)
    assert moment["trainer's weights"] == pytest.approx(2.0 * PARAMETERS, rel=0.02)
    assert moment["buffer"] == 1e9
    assert "KV cache" not in moment
    awake = priced(trainer, side, replace(OFFLOADED, sleeps=False)).device
    assert "KV cache" in awake["switch"]
    assert sum(awake["train"].values()) > 0.5 * side.memory_bytes


def test_engines_that_keep_their_weights_take_them_of_the_host(
    trainer: Trainer, side: RolloutSide
) -> None:
    kept = priced(trainer, side, replace(OFFLOADED, sleep_keeps_weights=True)).host
    assert kept["weights of sleeping engines"] == pytest.approx(8.0 * side.weight_bytes)


def test_a_critic_doubles_what_is_trained(trainer: Trainer, side: RolloutSide) -> None:
    single = priced(trainer, side, Residency())
    double = priced(trainer, side, Residency(has_critic=True))
    more = sum(double.device["train"].values()) - sum(single.device["train"].values())
    state = ("weights", "gradients", "optimizer")
    assert more == pytest.approx(sum(single.device["train"][name] for name in state))


def test_disaggregated_sides_are_alone(trainer: Trainer, side: RolloutSide) -> None:
    memory = priced(trainer, side, Residency(bucket_bytes=1e9), RlPlacement.DISAGGREGATED)
    assert "KV cache" in memory.device["rollout"]
    assert "trainer's weights" not in memory.device["rollout"]
    assert "engine's context" not in memory.device["train"]
    assert memory.peak_bytes == max(sum(parts.values()) for parts in memory.device.values())


def test_what_moves_is_what_leaves_and_comes_back(trainer: Trainer) -> None:
    price = trainer.memory(MICRO)
    assert moved_bytes(price, Residency()) == 0.0
    whole = float((price.weights_PC + price.optimizer_PC).max())
    assert moved_bytes(price, replace(OFFLOADED, has_reference=False)) == pytest.approx(whole)
    # The reference comes, and is dropped.
    assert moved_bytes(price, OFFLOADED) > whole
