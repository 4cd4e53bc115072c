"""Bytes that offloading takes of a node's memory."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.tuner.models import example_model
from tuner.config.columns import Strategies
from tuner.costs.train.columns_of import (
    StageLayers,
    hardware_of_pool,
    shape_of_model,
    stages_of_layouts,
)
from tuner.costs.train.host_memory import offloaded_bytes
from tuner.costs.train.memory import price_memory
from tuner.costs.train.memory_constants import MemoryConstants
from tuner.devices.catalogue import find_device
from tuner.prices.train.constants import GemmPrecision
from tuner.spec.accounting import num_parameters
from tuner.spec.cluster import Pool

MODEL = example_model("olmoe-1b-7b")
SHAPE = shape_of_model(MODEL, mtp_layers=0)
POOL = Pool(name="p", device="h100-sxm", nodes=2, devices_per_node=8)
HARDWARE = hardware_of_pool(find_device("h100-sxm"), POOL, precision=GemmPrecision.BF16)


def offloaded(*, pipeline: int = 1, inside: bool = False, **changes: Any) -> dict[str, float]:
    """Count for OLMoE on sixteen devices, two nodes."""
    columns: dict[str, Any] = {
        "sequence": 4096.0,
        "micro_batch": 1.0,
        "num_microbatches": 8.0,
        "data": 16.0 / pipeline,
        "pipeline": float(pipeline),
        "expert": min(4.0, 16.0 / pipeline),
        "zero_stage": 1.0,
    }
    strategies = Strategies(**(columns | changes))
    layers = MODEL.num_layers // pipeline
    layout = tuple(
        StageLayers(layers=layers, embedding=stage == 0, head=stage == pipeline - 1, mtp_layers=0)
        for stage in range(pipeline)
    )
    parts = offloaded_bytes(
        SHAPE,
        strategies,
        HARDWARE,
        stages_of_layouts(MODEL, [layout]),
        constants=MemoryConstants(),
        devices_per_node=8,
        inside_C=np.array([inside]),
    )
    return {what: float(size_C[0]) for what, size_C in parts.items()}


def test_the_optimizer_takes_sixteen_bytes_of_every_parameter() -> None:
    # fp32 weights, moments and gradients of 6.92e9 parameters, over two nodes.
    parameters = num_parameters(MODEL)
    whole = offloaded(optimizer_offload=1.0)
    assert whole["optimizer state and gradients"] == pytest.approx(16 * parameters / 2, rel=0.01)
    half = offloaded(optimizer_offload=0.5)
    assert half["optimizer state and gradients"] == pytest.approx(8 * parameters / 2, rel=0.01)
    assert offloaded() == {}
    # DeepSpeed's own estimate for ZeRO 3 with parameters on hosts is 18 bytes.
    shards = offloaded(optimizer_offload=1.0, parameter_offload=1.0, zero_stage=3.0)
    assert sum(shards.values()) == pytest.approx(18 * parameters / 2, rel=0.01)


def test_a_node_holds_the_stages_that_its_ranks_reach() -> None:
    # Sixteen stages of one device: a node has eight of them, the first eight with the embedding.
    spread = offloaded(pipeline=16, optimizer_offload=1.0)["optimizer state and gradients"]
    parameters = num_parameters(MODEL)
    assert spread == pytest.approx(16 * (parameters / 2), rel=0.01)
    # Two stages of eight devices: a node each; with the pipeline inside, both have parts of both.
    outside = offloaded(pipeline=2, optimizer_offload=1.0)["optimizer state and gradients"]
    inside = offloaded(pipeline=2, inside=True, optimizer_offload=1.0)
    assert outside == pytest.approx(16 * parameters / 2, rel=0.01)
    assert inside["optimizer state and gradients"] == pytest.approx(outside, rel=0.01)


def test_activations_leave_the_device_for_the_host() -> None:
    moved = offloaded(activation_offload=1.0)["activations"]
    columns = Strategies(
        sequence=4096.0, micro_batch=1.0, num_microbatches=8.0, data=16.0, expert=4.0
    )
    layout = (StageLayers(layers=MODEL.num_layers, embedding=True, head=True, mtp_layers=0),)
    stages = stages_of_layouts(MODEL, [layout])
    kept, without = (
        price_memory(
            SHAPE,
            replace(columns, zero_stage=1.0, activation_offload=share),
            HARDWARE,
            stages,
            constants=MemoryConstants(),
        ).activations_PC.max()
        for share in (0.0, 1.0)
    )
    assert moved == pytest.approx(8 * (kept - without))
    assert moved > 2**30
