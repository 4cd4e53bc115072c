"""Pools on datasheets, and the traffic of a closed form."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.tuner.models import example_model
from tuner.costs.serve.decoder import Formats, decoder_of
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.costs.serve.machine import ServingMachine
from tuner.devices.catalogue import find_device
from tuner.search.serve.demand import Demand, build_demand
from tuner.search.serve.options import ServingPool
from tuner.spec.cluster import Pool
from tuner.spec.serving.goal import ServeGoal

FORMATS = Formats(attention="fp8", output="fp8", ffn="fp8", experts="fp8", kv="bf16")


@pytest.fixture
def serving_pool() -> Callable[..., ServingPool]:
    def made(device: str = "h100-sxm", *, nodes: int = 2, per_node: int = 8) -> ServingPool:
        pool = Pool(name=device, device=device, nodes=nodes, devices_per_node=per_node)
        sheet = find_device(device)
        return ServingPool(
            pool=pool,
            machine=ServingMachine(sheet=sheet, tables=None),
            memory_bytes=float(sheet.memory_bytes),
            source="datasheet",
        )

    return made


@pytest.fixture
def demand() -> Callable[..., Demand]:
    def made(
        *, longest: int = 32768, slo: dict[str, object] | None = None, **traffic: object
    ) -> Demand:
        stated = {"rate": 5.0, "input_tokens": 2000, "output_tokens": 400} | traffic
        goal = ServeGoal.model_validate(
            {
                "kind": "serve",
                "engine": {"name": "vllm"},
                "traffic": {name: value for name, value in stated.items() if value is not None},
                "slo": slo or {},
            }
        )
        return build_demand(goal, longest=longest)

    return made


@pytest.fixture
def iteration(serving_pool: Callable[..., ServingPool]) -> Callable[..., Iteration]:
    def made(model: str = "mixtral-8x7b", engine: str = "vllm", **fields: object) -> Iteration:
        plain = Iteration(
            decoder=decoder_of(example_model(model)),
            formats=FORMATS,
            degrees=InstanceDegrees(attention_tensor=2, expert=2),
            engine=engine,
            machine=serving_pool().machine,
        )
        return replace(plain, **fields)  # type: ignore[arg-type]  # fields are named by the tests

    return made
