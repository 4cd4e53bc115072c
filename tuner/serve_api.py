"""Deployments as functions: what the command line calls and a notebook can call too."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from profilers.files import read_bounded
from tuner.backtest.serving.launches import SYSTEMS
from tuner.backtest.serving.tables import DATASHEET, machines_of
from tuner.costs.kv_profile import kv_table
from tuner.costs.serving.machine import ServingMachine
from tuner.devices.catalogue import find_device
from tuner.errors import SpecError
from tuner.paths import AnyPath, paths_of
from tuner.planner.serve.options import PoolSite
from tuner.planner.serve.plan_serve import make_serve_plan
from tuner.planner.serve.solve_mode import Settings
from tuner.planning_time import timed
from tuner.serve_kernels import kernel_hashes
from tuner.serve_plan import ServePlan, ServeProvenance
from tuner.spec.cluster import Pool
from tuner.spec.files import LARGEST_FILE_BYTES
from tuner.spec.serving.read import ServeSpec, read_serve_spec
from tuner.train_api import version
from tuner.units import format_bytes

EXPERTS: Final = "moe"
"""The table by which engines' measurements are told: each has its own kernels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deployed:
    """A deployment's plan and what it was made from."""

    plan: ServePlan
    spec: ServeSpec


def deploy(
    spec_path: AnyPath,
    *,
    profiles: AnyPath | Sequence[AnyPath] = (),
    time_limit_s: float = 60.0,
    clock: Callable[[], float] = time.perf_counter,
) -> Deployed:
    """Plan the deployment that a spec describes.

    Args:
        spec_path: the YAML file.
        profiles: stored profiles, or folders of aiconfigurator's tables, matched to pools by
            device; without any an installed aiconfigurator-core, and where that has nothing the
            device's datasheet, which the plan says.
        time_limit_s: for all searches together.
        clock: for the time limit and the reported solve time.

    Raises:
        SpecError: the spec is unusable.
        UnknownDeviceError: no description of a pool's device.
        ProfileUnreadableError: a table is damaged.
    """
    started_s = clock()
    spec_path = Path(spec_path)
    profiles = paths_of(profiles)
    spec = read_serve_spec(spec_path)
    sites = tuple(site_of(pool, profiles) for pool in spec.cluster.pools)
    plan = make_serve_plan(
        spec,
        sites,
        settings=Settings(time_limit_s=time_limit_s, clock=clock),
        provenance=ServeProvenance(
            moetune_version=version(),
            spec_sha256=hashlib.sha256(
                read_bounded(spec_path, most_bytes=LARGEST_FILE_BYTES)
            ).hexdigest(),
            profile_source={site.pool.name: site.source for site in sites},
            kernels_sha256=kernel_hashes(spec.cluster, profiles),
            notes=() if spec.model.moe is None else tuple(_kernel_notes(sites)),
        ),
    )
    return Deployed(plan=timed(plan, wall_s=clock() - started_s), spec=spec)


def _kernel_notes(sites: Sequence[PoolSite]) -> Iterator[str]:
    """Say where kernels of one engine stand for the fastest of several."""
    for site in sites:
        tables = site.machine.tables
        names = set() if tables is None else set(tables.softwares(EXPERTS)) - {""}
        engines = sorted({name.partition("@")[0] for name in names})
        if len(engines) == 1:
            yield (
                f"{site.pool.name}: kernels of {engines[0]} alone are known; error bands are of"
                " the fastest of several engines' kernels, so give more profiles with --profile"
            )


def site_of(pool: Pool, profiles: Sequence[Path]) -> PoolSite:
    """Price a pool on measured kernels where there are any, else on its datasheet.

    Raises:
        SpecError: the pool names no device.
        UnknownDeviceError: no description of its device.
        ProfileUnreadableError: a table is damaged.
    """
    if pool.device is None:
        raise SpecError(
            f"cluster.pools: {pool.name!r} names no 'device'; a profile holds kernels, and the"
            " device's description says how much memory and which links there are"
        )
    sheet = find_device(pool.device)
    if pool.memory_per_device is not None and pool.memory_per_device > sheet.memory_bytes:
        raise SpecError(
            f"cluster.pools: {pool.name!r}: memory_per_device"
            f" {format_bytes(pool.memory_per_device)} is more than the"
            f" {format_bytes(sheet.memory_bytes)} of {sheet.name}; leave it out, or name another"
            " device"
        )
    own = () if pool.profile is None else (pool.profile,)
    system = next((name for name, device in SYSTEMS.items() if device == sheet.name), None)
    if system is None:
        machine, origin = ServingMachine(sheet=sheet, tables=None), DATASHEET
    else:
        machines, origins = machines_of((system,), (*own, *profiles))
        machine, origin = machines[system], origins[system]
    return PoolSite(
        pool=pool,
        machine=machine,
        memory_bytes=float(pool.memory_per_device or sheet.memory_bytes),
        source=origin,
        conversions=kv_table((*own, *profiles), device=sheet.name),
    )
