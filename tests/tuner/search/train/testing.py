"""Problems, searches and plans of single pools from datasheets."""

import time
from dataclasses import replace
from typing import Any

import numpy as np

from tests.tuner.models import example_model
from tuner.catalog.manifest import anything
from tuner.costs.train.calibration import shipped
from tuner.costs.train.columns_of import hardware_of_pool, shape_of_model
from tuner.costs.train.memory_constants import MemoryConstants
from tuner.devices.catalogue import find_device
from tuner.plans.train import Plan, Provenance
from tuner.prices.train.constants import GemmPrecision, Software, uncalibrated
from tuner.search.settings import SearchSettings
from tuner.search.train.build_problem import price_pool
from tuner.search.train.candidate_prices import price
from tuner.search.train.candidates import Candidates
from tuner.search.train.plan_train import make_analytic_plan
from tuner.search.train.problem import TrainProblem
from tuner.search.train.search_result import SearchOutcome, Solutions
from tuner.search.train.space_size import by_facts
from tuner.spec.cluster import Pool
from tuner.spec.spec import Spec

ANYTHING = anything("anything")
NOTHING = Provenance(
    moetune_version="", spec_sha256="", profile_sha256={}, profile_source={}, extrapolated=()
)


def planned(spec: Spec, *, top: int = 2, time_limit_s: float = 60.0) -> Plan:
    """Plan a spec of one pool, without a search for what its targets lack."""
    return make_analytic_plan(
        spec,
        price_pool(spec.cluster.pools[0], residuals=shipped()),
        settings=SearchSettings(top=top, time_limit_s=time_limit_s, clock=time.perf_counter),
        provenance=NOTHING,
        with_unlaunchable=False,
    )


def make_problem(model: str = "olmoe-1b-7b", *, devices: int = 8, **changes: Any) -> TrainProblem:
    """Return a model of the examples on nodes of eight H100; any field can be replaced."""
    sheet = find_device("h100-sxm")
    pool = Pool(
        name="p",
        device="h100-sxm",
        nodes=max(1, devices // 8),
        devices_per_node=min(8, devices),
    )
    spec = example_model(model)
    hardware = hardware_of_pool(sheet, pool, precision=GemmPrecision.BF16)
    problem = TrainProblem(
        model=spec,
        shape=shape_of_model(spec, mtp_layers=spec.mtp_num_layers),
        hardware=hardware,
        constants=uncalibrated(
            sheet.generation, precision=GemmPrecision.BF16, software=Software.MEGATRON_2025
        ),
        software=Software.MEGATRON_2025,
        memory_constants=MemoryConstants(),
        num_devices=devices,
        memory_limit_bytes=0.95 * float(hardware.memory_bytes),
        sequence_length=4096,
        global_batch_size=32,
        capabilities=ANYTHING,
    )
    return replace(problem, **changes)


def every_decision(outcome: SearchOutcome) -> Solutions:
    """Price all legal decisions that fit, one kind of degrees at a time, without the search."""
    rows = outcome.degrees.rows(np.arange(outcome.degrees.num_partials))
    every: Solutions | None = None
    for facts, chosen in by_facts(rows):
        legal = outcome.options.legal(facts)
        if not len(legal):
            continue
        candidates = Candidates(
            rows={name: np.repeat(column[chosen], len(legal)) for name, column in rows.items()},
            options={
                axis: np.tile(legal[:, at], len(chosen))
                for at, axis in enumerate(outcome.options.choices)
            },
        )
        prices = price(outcome.problem, outcome.options, candidates, is_moved_to_fit=True)
        some = Solutions(
            candidates=candidates,
            step_s=prices.step_s,
            peak_bytes=prices.peak_bytes,
            layers_PC=prices.layers_PC,
        )
        fits = np.flatnonzero(prices.peak_bytes <= outcome.problem.memory_limit_bytes)
        every = some.taken(fits) if every is None else every.concat(some.taken(fits))
    assert every is not None
    return every
