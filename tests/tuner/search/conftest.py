"""Searches and plans of the tiny model on the formula machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tuner.engines.targets import programs
from tuner.goals.train_spec import read_spec
from tuner.plans.train import Plan, Provenance
from tuner.search.reference.engine_workload import workload_of
from tuner.search.reference.layer_costs import PricedMachine
from tuner.search.reference.plan_profiled import ProfiledProblem, make_plan
from tuner.search.reference.search import ReferenceOutcome
from tuner.search.settings import SearchSettings


@dataclass(frozen=True, kw_only=True)
class SearchCase:
    """A problem with the settings of its search."""

    problem: ProfiledProblem
    settings: SearchSettings

    def search(self) -> ReferenceOutcome:
        return self.problem.search(self.settings)

    def plan(self) -> Plan:
        return make_plan(
            self.problem.spec,
            self.problem.machine,
            settings=self.settings,
            provenance=Provenance(
                moetune_version="0.1.0",
                spec_sha256="0" * 64,
                profile_sha256={},
                profile_source={},
                extrapolated=(),
            ),
        )


@pytest.fixture
def make_case(
    tiny_spec: Callable[..., Path], formula_machine: Callable[..., PricedMachine]
) -> Callable[..., SearchCase]:
    """make_case(machine={...}, settings={...}, **changes of the spec); two devices by default.

    A small space: micro-batches of 2 sequences, no ZeRO stage 3, two chunk counts.
    """

    def make(
        *,
        machine: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        **changes: Any,
    ) -> SearchCase:
        limits = {"micro_batch_size": [2], "zero_stage": [0, 1], "chunks": [1, 4]}
        read = read_spec(tiny_spec(**{"pool": {"devices_per_node": 2}, "search": limits} | changes))
        devices = formula_machine(**({"num_devices": read.num_devices} | (machine or {})))
        chosen: dict[str, Any] = {
            "top": 3,
            "time_limit_s": 60.0,
            "clock": time.perf_counter,
        }
        return SearchCase(
            problem=ProfiledProblem(
                spec=read,
                work=workload_of(read),
                machine=devices,
                capabilities=programs(read.emit).capabilities(),
            ),
            settings=SearchSettings(**(chosen | (settings or {}))),
        )

    return make
