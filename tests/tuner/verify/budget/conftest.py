"""A plan of sixteen devices on four nodes, and machines that differ from what it believes."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from profilers.records import Profile
from tests.expect import present
from tests.tuner.verify.budget.testing import HiddenMachine
from tuner import api
from tuner.plans.train import Plan
from tuner.search.reference.layer_costs import PricedMachine
from tuner.verify.launches import TrialJobs
from tuner.verify.space import TrainSpace, measured_prices

SEARCH: Mapping[str, Any] = {
    "tensor_model_parallel_size": [1, 2],
    "virtual_pipeline_model_parallel_size": [1],
    "micro_batch_size": [2],
    "expert_model_parallel_size": [2, 4, 8],
    "dispatcher": ["alltoall"],
}
CANDIDATES = 14


@dataclass(frozen=True, kw_only=True, eq=False)
class Site:
    """A plan with what prices its decisions."""

    space: TrainSpace

    @property
    def machine(self) -> PricedMachine:
        return present(self.space.machine)

    @property
    def plan(self) -> Plan:
        return self.space.plan

    @cache  # noqa: B019 # one site lives as long as the session
    def jobs(self, *, max_devices: int = 16) -> TrialJobs:
        price = measured_prices(self.machine)
        return TrialJobs(space=self.space, price=price, max_devices=max_devices)


@pytest.fixture(scope="session")
def wide(
    tmp_path_factory: pytest.TempPathFactory,
    write_spec: Callable[..., Path],
    profile_for: Callable[[Path], Profile],
    store_profile: Callable[[Path, Profile], Path],
) -> Site:
    """Eight layers on sixteen devices."""
    folder = tmp_path_factory.mktemp("wide")
    path = write_spec(
        folder,
        model={"num_hidden_layers": 8},
        pool={"devices_per_node": 4, "nodes": 4},
        goal={"global_batch_size": 32},
        search=SEARCH,
    )
    profile = profile_for(path)
    store_profile(folder / "profile", profile)
    plan = api.plan(path, top=CANDIDATES).plan
    plan = plan.model_copy(
        update={"alternatives": plan.runners_up[: CANDIDATES - 1], "variants": ()}
    )
    return Site(
        space=TrainSpace(
            plan=plan,
            machine=api.machine_of(plan.cluster.pools[0], profile),
        )
    )


@pytest.fixture
def hidden(wide: Site) -> Callable[..., HiddenMachine]:
    """Make a machine from a seed: hidden(3); its slowest part is another one than predicted."""

    def made(seed: int, **options: Any) -> HiddenMachine:
        machine = wide.machine
        computation, communication = np.exp(np.random.default_rng(seed).normal(0.0, 0.3, 2))
        residual = machine.residual.model_copy(
            update={"computation": float(computation), "communication": float(communication)}
        )
        price = measured_prices(dataclasses.replace(machine, residual=residual))
        options = {"num_steps": 2400} | options
        return HiddenMachine(jobs=wide.jobs(), price=price, seed=seed, **options)

    return made
