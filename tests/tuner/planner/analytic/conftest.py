from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuner.costs.analytic.columns_of import hardware_of_pool, shape_of_model
from tuner.costs.analytic.constants import Precision, Software, uncalibrated
from tuner.costs.analytic.memory_constants import MemoryConstants
from tuner.devices.catalogue import find_device
from tuner.planner.analytic.question import Question
from tuner.spec.cluster import Pool
from tuner.spec.huggingface.read import read_model
from tuner.spec.manifests.manifest import Capabilities

MODELS = Path(__file__).parents[4] / "examples" / "models"
ANYTHING = Capabilities(names=("anything",))

MakeQuestion = Callable[..., Question]


@pytest.fixture
def ask() -> MakeQuestion:
    """A model of the examples on nodes of eight H100; any field can be replaced."""

    def make(model: str = "olmoe-1b-7b", *, devices: int = 8, **changes: Any) -> Question:
        sheet = find_device("h100-sxm")
        pool = Pool(
            name="p",
            device="h100-sxm",
            nodes=max(1, devices // 8),
            devices_per_node=min(8, devices),
        )
        spec = read_model(MODELS / model)
        hardware = hardware_of_pool(sheet, pool, precision=Precision.BF16)
        question = Question(
            model=spec,
            shape=shape_of_model(spec, mtp_layers=spec.mtp_num_layers),
            hardware=hardware,
            constants=uncalibrated(
                sheet.generation, precision=Precision.BF16, software=Software.MEGATRON_2025
            ),
            software=Software.MEGATRON_2025,
            memory_constants=MemoryConstants(),
            num_devices=devices,
            memory_limit_bytes=0.95 * float(hardware.memory_bytes),
            sequence_length=4096,
            global_batch_size=32,
            capabilities=ANYTHING,
        )
        return replace(question, **changes)

    return make
