"""Deployments as functions, for the command line and for notebooks."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from profilers.files import read_bounded
from tuner.backtest.serving.launches import SYSTEMS
from tuner.backtest.serving.tables import DATASHEET, build_machines
from tuner.costs.lookups import Lookups
from tuner.costs.serve.kv_profile import conversion_prices
from tuner.costs.serve.lookups import noting
from tuner.costs.serve.machine import ServingMachine
from tuner.devices.catalogue import find_device
from tuner.errors import SpecError
from tuner.goals.serve_kernels import kernel_hashes
from tuner.goals.train_plan import version
from tuner.paths import AnyPath, to_paths
from tuner.plans.proof import with_planning_time
from tuner.plans.serve import ServePlan, ServeProvenance
from tuner.search.serve.options import ServingPool
from tuner.search.serve.plan_serve import make_serve_plan
from tuner.search.settings import SearchSettings
from tuner.spec.cluster import Pool
from tuner.spec.files import LARGEST_FILE_BYTES
from tuner.spec.serving.read import ServeSpec, read_serve_spec
from tuner.units import format_bytes

EXPERTS: Final = "moe"
"""The table that distinguishes engines: each has its own MoE kernels."""


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
    lookups: Lookups | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Deployed:
    """Plan the deployment that a spec describes.

    Args:
        spec_path: the YAML file.
        profiles: stored profiles, or folders of aiconfigurator's tables, matched to pools by
            device; without any an installed aiconfigurator-core, and where that has nothing the
            device's datasheet, which the plan says.
        time_limit_s: for all searches together.
        lookups: filled with the kernels whose prices are looked up.
        clock: for the time limit and the reported solve time.

    Raises:
        SpecError: the spec is unusable.
        UnknownDeviceError: no description of a pool's device.
        ProfileUnreadableError: a table is damaged.
    """
    started_s = clock()
    spec_path = Path(spec_path)
    profiles = to_paths(profiles)
    spec = read_serve_spec(spec_path)
    priced_pools = tuple(price_serving_pool(pool, profiles) for pool in spec.cluster.pools)
    if lookups is not None:
        priced_pools = tuple(
            replace(pool, machine=noting(pool.machine, lookups)) for pool in priced_pools
        )
    plan = make_serve_plan(
        spec,
        priced_pools,
        settings=SearchSettings(time_limit_s=time_limit_s, clock=clock),
        provenance=ServeProvenance(
            moetune_version=version(),
            spec_sha256=hashlib.sha256(
                read_bounded(spec_path, most_bytes=LARGEST_FILE_BYTES)
            ).hexdigest(),
            profile_source={priced.pool.name: priced.source for priced in priced_pools},
            kernels_sha256=kernel_hashes(spec.cluster, profiles),
            notes=() if spec.model.moe is None else tuple(_kernel_notes(priced_pools)),
        ),
    )
    return Deployed(plan=with_planning_time(plan, wall_s=clock() - started_s), spec=spec)


def _kernel_notes(priced_pools: Sequence[ServingPool]) -> Iterator[str]:
    """Note pools with kernels of a single engine, where bands are for the fastest of several."""
    for priced in priced_pools:
        tables = priced.machine.tables
        names = set() if tables is None else set(tables.softwares(EXPERTS)) - {""}
        engines = sorted({name.partition("@")[0] for name in names})
        if len(engines) == 1:
            yield (
                f"{priced.pool.name}: kernels of {engines[0]} only are known; error bands are of"
                " the fastest of several engines' kernels, so give more profiles with --profile"
            )


def price_serving_pool(pool: Pool, profiles: Sequence[Path]) -> ServingPool:
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
        machines, origins = build_machines((system,), (*own, *profiles))
        machine, origin = machines[system], origins[system]
    return ServingPool(
        pool=pool,
        machine=machine,
        memory_bytes=float(pool.memory_per_device or sheet.memory_bytes),
        source=origin,
        conversions=conversion_prices((*own, *profiles), device=sheet.name),
    )
