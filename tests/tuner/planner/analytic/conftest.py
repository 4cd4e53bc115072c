from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuner.costs.analytic.columns_of import hardware_of_pool, shape_of_model
from tuner.costs.analytic.constants import Precision, Software, uncalibrated
from tuner.costs.analytic.memory_constants import MemoryConstants
from tuner.devices.catalogue import find_device
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.incumbents import Found
from tuner.planner.analytic.incumbents import Search as Searched
from tuner.planner.analytic.min_memory_layout import price_to_fit
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.space_size import by_facts
from tuner.spec.cluster import Pool
from tuner.spec.huggingface.read import read_model
from tuner.spec.manifests.manifest import Capabilities

MODELS = Path(__file__).parents[4] / "examples" / "models"
ANYTHING = Capabilities(names=("anything",))

MakeQuestion = Callable[..., Question]
EveryDecision = Callable[[Searched], Found]


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def every_decision() -> EveryDecision:
    """Price all legal decisions that fit, without the search."""
    return priced_one_by_one


def priced_one_by_one(found: Searched) -> Found:
    """All legal decisions that fit, priced one kind of degrees at a time."""
    rows = found.degrees.rows(np.arange(found.degrees.num_cells))
    every: Found | None = None
    for facts, chosen in by_facts(rows):
        legal = found.ways.legal(facts)
        if not len(legal):
            continue
        candidates = Candidates(
            rows={name: np.repeat(column[chosen], len(legal)) for name, column in rows.items()},
            ways={
                axis: np.tile(legal[:, at], len(chosen))
                for at, axis in enumerate(found.ways.choices)
            },
        )
        prices, _ = price_to_fit(found.question, found.ways, candidates)
        some = Found(
            candidates=candidates,
            step_s=prices.step_s,
            peak_bytes=prices.peak_bytes,
            layers_PC=prices.layers_PC,
        )
        fits = np.flatnonzero(prices.peak_bytes <= found.question.memory_limit_bytes)
        every = some.taken(fits) if every is None else every.beside(some.taken(fits))
    assert every is not None
    return every
