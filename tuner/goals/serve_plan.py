"""Deployments as functions, for the command line and for notebooks."""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from profilers.files import read_bounded
from profilers.interpolation import fit_rows
from profilers.store import holds_profile, read_header, read_profile
from tuner.backtest.serving.launches import SYSTEMS
from tuner.backtest.serving.tables import DATASHEET, build_machines
from tuner.calibrate.engine_rates import fit_rates
from tuner.calibrate.server_records import holds_server, read_server_calibration
from tuner.catalog.serve_rules.manifest import ServingCapabilities
from tuner.costs.serve.engine_steps import EngineSteps, read_engine_steps
from tuner.costs.serve.kv_profile import conversion_prices
from tuner.costs.serve.lookups import noting
from tuner.costs.serve.residual import ServeResidual
from tuner.devices.catalogue import CPU
from tuner.devices.datasheet import Datasheet, Generation
from tuner.devices.measured import measured_sheet
from tuner.engines.serving.releases import ENGINE_TRAITS, release_on
from tuner.errors import SpecError
from tuner.goals.profiles import is_plan_of, stored_profile
from tuner.goals.serve_kernels import installed_notes, kernel_hashes
from tuner.goals.serve_spec import goals_by_formats, read_serve_spec
from tuner.goals.train_plan import version
from tuner.paths import AnyPath, to_paths
from tuner.plans.folder import read_verified_as
from tuner.plans.proof import with_planning_time
from tuner.plans.serve import ServePlan, ServeProvenance
from tuner.prices.lookups import Lookups
from tuner.prices.serve.corrections import UNCORRECTED
from tuner.prices.serve.machine import ServingMachine
from tuner.prices.serve.profiled import ProfiledMachine
from tuner.prices.serve.reached import reached_machine
from tuner.search.serve.options import ServingPool
from tuner.search.serve.plan_serve import make_serve_plan
from tuner.search.settings import SearchSettings
from tuner.spec.cluster import Pool
from tuner.spec.files import LARGEST_FILE_BYTES
from tuner.spec.serving.goal import ServeGoal
from tuner.spec.serving.spec import ServeSpec
from tuner.units import format_bytes, format_counted
from tuner.verify.deployments.records import ServeVerified

PROFILED: Final = frozenset(
    {"gemm", "grouped_gemm", "attention", "decode_attention", "copy", "collective"}
    | {"linear_scan", "linear_update", "index_scores"}
)
"""Tables of a profile of processors that price a deployment."""

PROFILE: Final = "profile"
"""Source of a pool that is priced, and described, by its own profile."""
EXPERTS: Final = "moe"
"""The table that distinguishes engines: each has its own MoE kernels."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Deployed:
    """A deployment's plan and what it was made from."""

    plan: ServePlan
    spec: ServeSpec
    profiles: Mapping[str, Path]
    """Profiles that describe devices without a datasheet, by pool."""


def deploy(
    spec_path: AnyPath,
    *,
    profiles: AnyPath | Sequence[AnyPath] = (),
    time_limit_s: float = 60.0,
    lookups: Lookups | None = None,
    residual: ServeResidual | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Deployed:
    """Plan the deployment that a spec describes.

    Args:
        spec_path: the YAML file.
        profiles: stored profiles, or folders of aiconfigurator's tables, matched to pools by
            device; where they have nothing the device's datasheet, which the plan says.
        time_limit_s: for all searches together.
        lookups: filled with the kernels whose prices are looked up.
        residual: of the engine; None: from the trials of a plan whose folder is given as a profile.
        clock: for the time limit and the reported solve time.

    Raises:
        SpecError: the spec is unusable.
        UnknownDeviceError: no description of a pool's device.
        ProfileUnreadableError: a table is damaged.
    """
    started_s = clock()
    spec = read_serve_spec(Path(spec_path))
    settings = SearchSettings(time_limit_s=time_limit_s, clock=clock)
    made = plan_deployment(
        spec, to_paths(profiles), settings=settings, lookups=lookups, residual=residual
    )
    return replace(made, plan=with_planning_time(made.plan, wall_s=clock() - started_s))


def plan_deployment(
    spec: ServeSpec,
    profiles: Sequence[Path],
    *,
    settings: SearchSettings,
    lookups: Lookups | None = None,
    residual: ServeResidual | None = None,
) -> Deployed:
    """Plan what a spec describes, in the best of its formats; raises as `deploy` does."""
    goals = goals_by_formats(spec.goal, spec.model, spec.cluster)
    shared = replace(settings, time_limit_s=settings.time_limit_s / len(goals))
    made = [
        _plan_formats(
            replace(spec, goal=goal),
            profiles,
            settings=shared,
            lookups=lookups,
            residual=residual,
        )
        for goal in goals
    ]
    best = min(made, key=_least)
    others = tuple(f"{_served(plan.plan)}; not chosen" for plan in made if plan is not best)
    noted = best.plan.provenance.model_copy(
        update={"notes": (*best.plan.provenance.notes, *others)}
    )
    return replace(best, plan=best.plan.model_copy(update={"provenance": noted}))


def _least(made: Deployed) -> float:
    """Return what the goal minimises."""
    predicted, decision = made.plan.predicted, made.plan.decision
    if predicted is None or decision is None:
        return math.inf
    value = {"rate": -predicted.requests_per_s, "cost": predicted.cost_per_hour or 0.0}
    return value.get(made.plan.goal.objective, float(decision.num_devices))


def _served(plan: ServePlan) -> str:
    """Say what a plan's formats come to."""
    formats = f"{plan.goal.quantization} weights and a {plan.goal.kv_cache_dtype} cache"
    if plan.predicted is None or plan.decision is None:
        return f"{formats} do not serve the goal"
    return (
        f"{formats}: {format_counted(plan.decision.num_devices, 'device')},"
        f" {plan.predicted.requests_per_s:.4g} requests/s"
    )


def _plan_formats(
    spec: ServeSpec,
    profiles: Sequence[Path],
    *,
    settings: SearchSettings,
    lookups: Lookups | None,
    residual: ServeResidual | None,
) -> Deployed:
    priced_pools = price_serving_pools(
        spec, profiles, needs_profile=lookups is None, residual=residual
    )
    if lookups is not None:
        priced_pools = tuple(
            replace(pool, machine=noting(pool.machine, lookups)) for pool in priced_pools
        )
    sources = {priced.pool.name: priced.source for priced in priced_pools}
    plan = make_serve_plan(
        spec,
        priced_pools,
        settings=settings,
        provenance=ServeProvenance(
            moetune_version=version(),
            spec_sha256=hashlib.sha256(
                read_bounded(spec.path, most_bytes=LARGEST_FILE_BYTES)
            ).hexdigest(),
            profile_source=sources,
            kernels_sha256=kernel_hashes(spec.cluster, tuple(map(stored_profile, profiles))),
            residual=priced_pools[0].residual,
            notes=(
                *(() if spec.model.moe is None else _kernel_notes(priced_pools)),
                *_measured_notes(priced_pools, spec),
                *installed_notes(sources, spec.cluster),
            ),
        ),
    )
    described = {
        priced_pool.pool.name: priced_pool.profile
        for priced_pool in priced_pools
        if priced_pool.profile is not None
    }
    return Deployed(plan=plan, spec=spec, profiles=described)


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


def _measured_notes(priced_pools: Sequence[ServingPool], spec: ServeSpec) -> Iterator[str]:
    """Say what a profile of processors priced, and what launches corrected."""
    for priced in priced_pools:
        if priced.profile is not None and priced.machine.host is None:
            yield (
                f"{priced.pool.name}: priced by torch's kernels; the engine has others, which"
                " `moetune profile --suite engine` measures"
            )
        elif priced.profile is not None:
            yield f"{priced.pool.name}: priced by steps of the engine on these devices"
    residual = priced_pools[0].residual
    if residual is not None:
        release = spec.releases[priced_pools[0].pool.name].release
        yield from residual.notes(release=release, model=spec.model.name)


def price_serving_pools(
    spec: ServeSpec,
    profiles: Sequence[Path],
    *,
    needs_profile: bool = True,
    residual: ServeResidual | None = None,
) -> tuple[ServingPool, ...]:
    """Price every pool, and correct all of them or none by what launches said.

    Args:
        spec: of the deployment.
        profiles: given beside the pools' own.
        needs_profile: processors are refused without one; otherwise one core stands for them.
        residual: of the engine; None: from the trials of a plan whose folder is given as a profile.

    Raises:
        SpecError: a pool names no device, or has no profile that it needs.
        UnknownDeviceError: no description of a pool's device.
        ProfileUnreadableError: a table is damaged.
    """
    priced = tuple(
        price_serving_pool(
            pool,
            profiles,
            goal=spec.goal,
            needs_profile=needs_profile,
        )
        for pool in spec.cluster.pools
    )
    known = {pool.residual for pool in priced} if residual is None else {residual}
    # Launches of one engine say nothing of deployments with another one beside it.
    common = next(iter(known)) if len(known) == 1 else None
    return tuple(with_residual(pool, common) for pool in priced)


def with_residual(pool: ServingPool, residual: ServeResidual | None) -> ServingPool:
    """Return a pool whose steps and latencies are corrected."""
    steps = UNCORRECTED if residual is None else residual.steps
    machine = pool.machine
    if machine.corrections != steps:
        machine = replace(machine, corrections=steps)
    return replace(pool, residual=residual, machine=machine)


def price_serving_pool(
    pool: Pool,
    profiles: Sequence[Path],
    *,
    goal: ServeGoal | None = None,
    needs_profile: bool = True,
) -> ServingPool:
    """Price a pool on measured kernels where there are any, else on its datasheet.

    Args:
        pool: with a device.
        profiles: given beside the pool's own.
        goal: with the engine, whose own steps count where a processor's profile holds them;
            None: kernels alone.
        needs_profile: processors are refused without one; otherwise one core stands for them.

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
    sheet = pool.sheet
    is_processor = sheet.generation is Generation.PROCESSOR
    stated = pool.memory_per_device
    if not is_processor and stated is not None and stated > sheet.memory_bytes:
        raise SpecError(
            f"cluster.pools: {pool.name!r}: memory_per_device"
            f" {format_bytes(stated)} is more than the"
            f" {format_bytes(sheet.memory_bytes)} of {sheet.name}; leave it out, or name another"
            " device"
        )
    pool_profiles = () if pool.profile is None else (pool.profile,)
    if is_processor:
        priced = _profiled_pool(
            pool, (*profiles, *pool_profiles), goal=goal, needs_profile=needs_profile
        )
    else:
        priced = _tabled_pool(pool, profiles, pool_profiles)
    if goal is None or priced.residual is not None:
        return with_residual(priced, priced.residual)
    folders = (*profiles, *pool_profiles)
    return with_residual(priced, _logged_residual(priced, folders, release_on(goal, pool)))


def _tabled_pool(
    pool: Pool, profiles: Sequence[Path], pool_profiles: Sequence[Path]
) -> ServingPool:
    """Price a pool of accelerators on tables of its device, else on its datasheet."""
    sheet = pool.sheet
    profiles = tuple(map(stored_profile, profiles))
    profiles = tuple(path for path in profiles if holds_profile(path) or not holds_server(path))
    system = next((name for name, device in SYSTEMS.items() if device == sheet.name), None)
    if system is None:
        machine, origin = ServingMachine(sheet=sheet, tables=None, engines=ENGINE_TRAITS), DATASHEET
    else:
        machines, origins = build_machines((system,), (*pool_profiles, *profiles))
        machine, origin = machines[system], origins[system]
    return ServingPool(
        pool=pool,
        machine=replace(machine, sheet=linked_sheet(machine.sheet, pool)),
        memory_bytes=float(pool.memory_per_device or sheet.memory_bytes),
        source=origin,
        conversions=conversion_prices((*pool_profiles, *profiles), device=sheet.name),
    )


def linked_sheet(sheet: Datasheet, pool: Pool) -> Datasheet:
    """Return a device's datasheet with a pool's links: its domain, and a device's share of NICs."""
    card = (pool.nic or sheet.scale_out_bytes_per_s) * pool.nics / pool.oversubscription
    links = {
        "scale_up_domain": pool.domain,
        "scale_out_bytes_per_s": card / pool.devices_per_node,
    }
    return sheet.model_copy(update=links)


def _profiled_pool(
    pool: Pool, profiles: Sequence[Path], *, goal: ServeGoal | None, needs_profile: bool
) -> ServingPool:
    """Price a pool of processors on the first profile of processors.

    Where the profile holds steps of the engine, its rates count, else curves of torch's kernels.

    Raises:
        SpecError: there is none.
    """
    folder = next(
        (
            folder
            for folder in profiles
            if holds_profile(stored_profile(folder))
            and read_header(stored_profile(folder)).machine.device_kind == "cpu"
        ),
        None,
    )
    if folder is None and not needs_profile:
        return ServingPool(
            pool=pool,
            machine=ServingMachine(sheet=CPU, tables=None, engines=ENGINE_TRAITS),
            memory_bytes=float(pool.memory_per_device or CPU.memory_bytes),
            source=DATASHEET,
        )
    if folder is None:
        raise SpecError(
            f"cluster.pools: {pool.name!r}: processors have no datasheet; measure one with"
            " `moetune profile -o DIR --for SPEC.yaml` and name it with --profile DIR"
        )
    path = stored_profile(folder)
    release = None if goal is None else release_on(goal, pool)
    profile = read_profile(path, operations=PROFILED)
    measured = measured_sheet(profile)
    memory_bytes = pool.memory_per_device or measured.memory_bytes
    rate = linked_sheet(measured, pool).scale_out_bytes_per_s
    sheet = measured.model_copy(update={"scale_out_bytes_per_s": rate})
    steps = read_engine_steps(path)
    if steps is not None and release is not None and _is_of(steps, release):
        rated = ServingMachine(sheet=sheet, tables=None, engines=ENGINE_TRAITS)
        machine: ServingMachine = reached_machine(rated, fit_rates(steps, rated))
        start_up_s = steps.start_up_s
    else:
        machine = ProfiledMachine(
            sheet=sheet,
            tables=None,
            engines=ENGINE_TRAITS,
            curves=fit_rows(profile.measurements),
        )
        start_up_s = None
    return ServingPool(
        pool=pool,
        machine=machine,
        memory_bytes=float(memory_bytes),
        source=PROFILE,
        profile=path,
        start_up_s=start_up_s,
        residual=_residual(folder, release) if release is not None else None,
        conversions=conversion_prices((path,), device=CPU.name),
    )


def _residual(folder: Path, release: ServingCapabilities) -> ServeResidual | None:
    """Return what the trials of a plan say of a release; None where the folder is no plan."""
    verified = read_verified_as(ServeVerified, folder) if is_plan_of(folder, "serve") else None
    residual = None if verified is None else verified.residual
    return residual if residual is not None and _is_of(residual, release) else None


def _logged_residual(
    priced: ServingPool, profiles: Sequence[Path], release: ServingCapabilities
) -> ServeResidual | None:
    """Return what the logs of a server say of an engine on a pool; None where none are given.

    Raises:
        SpecError: they are over other prices.
    """
    for folder in profiles:
        made = read_server_calibration(stored_profile(folder))
        device = priced.machine.sheet.name
        if made is None or (made.residual.engine, made.device) != (release.name, device):
            continue
        if made.kernels != priced.source:
            raise SpecError(
                f"--profile {str(folder)!r}: its corrections are over prices of {made.kernels}, and"
                f" {priced.pool.name!r} is priced by {priced.source}; give the --profile that they"
                " were made with besides"
            )
        return made.residual.of_release(release.release)
    return None


def _is_of(measured: EngineSteps | ServeResidual, release: ServingCapabilities) -> bool:
    return (measured.engine, measured.release) == (release.name, release.release)
