"""Problems of specs and pools on datasheets, the traffic of a closed form, and one instance."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.tuner.models import example_model
from tuner.costs.serve.decoder import Formats, decoder_of
from tuner.costs.serve.engine import InstanceDegrees
from tuner.costs.serve.iteration import Iteration
from tuner.devices.catalogue import find_device
from tuner.engines.serving.releases import ENGINE_TRAITS
from tuner.goals.serve_plan import price_serving_pool
from tuner.goals.serve_spec import read_serve_spec
from tuner.prices.serve.machine import ServingMachine
from tuner.search.serve.demand import Demand, build_demand
from tuner.search.serve.options import ServingPool
from tuner.search.serve.problem import ServeProblem
from tuner.search.serve.solve_mode import build_serve_problem
from tuner.search.settings import SearchSettings
from tuner.spec.cluster import Pool
from tuner.spec.serving.goal import ServeGoal

FORMATS = Formats(attention="fp8", output="fp8", ffn="fp8", experts="fp8", kv="bf16")


def serving_pool(device: str = "h100-sxm", *, nodes: int = 2, per_node: int = 8) -> ServingPool:
    pool = Pool(name=device, device=device, nodes=nodes, devices_per_node=per_node)
    sheet = find_device(device)
    return ServingPool(
        pool=pool,
        machine=ServingMachine(engines=ENGINE_TRAITS, sheet=sheet, tables=None),
        memory_bytes=float(sheet.memory_bytes),
        source="datasheet",
    )


def demand(
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


def iteration(model: str = "mixtral-8x7b", engine: str = "vllm", **fields: object) -> Iteration:
    plain = Iteration(
        decoder=decoder_of(example_model(model)),
        formats=FORMATS,
        degrees=InstanceDegrees(attention_tensor=2, expert=2),
        traits=ENGINE_TRAITS[engine],
        machine=serving_pool().machine,
    )
    return replace(plain, **fields)  # type: ignore[arg-type]  # fields are named by the tests


def problem_of(path: Path, *, settings: SearchSettings | None = None, **hits: Any) -> ServeProblem:
    """Price every pool of a spec."""
    spec = read_serve_spec(path)
    serving_pools = tuple(price_serving_pool(pool, ()) for pool in spec.cluster.pools)
    return build_serve_problem(spec, serving_pools, settings or SearchSettings(), **hits)
