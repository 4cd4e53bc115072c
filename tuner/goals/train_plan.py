"""Training plans as functions, for the command line and for notebooks.

Files are read and clocks enter here; nothing is written.
"""

import hashlib
import importlib.metadata
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from profilers.files import read_bounded
from profilers.imports.link_matrix import link_matrix_csv
from profilers.records import Profile, ProfileHeader
from profilers.store import holds_profile, read_header, read_profile
from tuner.catalog.manifest import Capabilities, of_model, with_adapters
from tuner.catalog.programs import Programs
from tuner.costs.residuals import Residual
from tuner.errors import SpecError
from tuner.goals.profiles import machine_of, pool_profile, shipped_residual, trial_residual
from tuner.goals.train_notes import analytic_notes, profile_notes, reference_notes, with_assumptions
from tuner.goals.train_spec import read_spec
from tuner.paths import AnyPath, to_paths
from tuner.plans.folder import MAX_PROFILE_FILE_BYTES
from tuner.plans.proof import with_planning_time
from tuner.plans.train import Plan, Provenance
from tuner.search.progress import PlanningEvent, ProgressListener, ignore_progress
from tuner.search.settings import SearchSettings
from tuner.spec.features import ModelFeature, features
from tuner.spec.files import LARGEST_FILE_BYTES
from tuner.spec.spec import Spec
from tuner.spec.tune import NETWORK, Adapters, adapted, matrices
from tuner.verify.launches import REFERENCE

if TYPE_CHECKING:
    from tuner.costs.train.measured_profile import MeasuredProfile
    from tuner.search.train.build_problem import PricedPool
    from tuner.search.train.fewer_nodes import FewerNodesPlan
    from tuner.spec.cluster import Pool

NODE_ORDER_SHARE = 0.25
"""Share of the time limit for putting the nodes of one pool in order."""
FORMER_SOLVERS: Final = ("exact", "milp", "cp_sat")
"""Values of `method`, which choose nothing any more and are read for one release."""


def version() -> str:
    """Version of the installed distribution."""
    return importlib.metadata.version("moetune")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan and the inputs that it was made from."""

    plan: Plan
    spec: Spec
    profiles: Mapping[str, Path]
    """Folders of the stored profiles by pool; none where the plan rests on datasheets."""
    fewer: "FewerNodesPlan | None" = None
    """Plan of the layout for one node less; None where the job has none."""
    spec_yaml: bytes | None = None
    """File of the spec with the numbers of nodes that were chosen; None: the file that was read."""


def plan_training(
    spec_path: AnyPath,
    *,
    profiles: AnyPath | Sequence[AnyPath] = (),
    top: int = 5,
    time_limit_s: float = 60.0,
    method: str | None = None,
    calibrated: bool = True,
    with_unlaunchable: bool = True,
    processes: int = 1,
    residual: Residual | None = None,
    clock: Callable[[], float] = time.perf_counter,
    watch: ProgressListener = ignore_progress,
) -> Planned:
    """Plan the training run that a spec describes.

    A pool with a stored profile is planned on what was measured there; one that only names its
    device on the datasheet, corrected by what published runs have shown. Where accelerators were
    measured and the target is not the reference engine, the profile's kernels and collectives
    stand in the analytic model, and the datasheet for what it lacks.

    Args:
        spec_path: the YAML file.
        profiles: stored profiles, matched to pools by device; without them the spec's own.
        top: how many decisions to return at least.
        time_limit_s: for the search, and for each further search that the plan needs.
        method: former choice of a layout's solver on a profile of the reference step, which the
            plan's first note says is ignored; the next release refuses it.
        calibrated: whether datasheets are corrected by the residuals that ship.
        with_unlaunchable: whether to search for what each feature that the targets lack would gain;
            up to half of the time on the analytic model; nothing else of the plan depends on it.
        processes: that may work at a time where the analytic model plans one pool; beyond 1, this
            one is forked, which a program with threads of its own may not want.
        residual: of the engine on a profile of the reference step; None: from the trials of a plan
            whose folder is among the profiles, else the one that ships.
        clock: for the time limit and the reported solve time.
        watch: gets every stage of a search on the analytic model.

    Raises:
        SpecError: the spec is unusable, or asks for what this version cannot price; or `method` is
            none of the former names, or stated where no profile of the reference step is used.
        ProfileUnreadableError: a profile is missing or damaged.
        OutsideProfileError: the profile lacks an operation that the model needs.
    """
    started_s = clock()
    spec_path = Path(spec_path)
    profiles = to_paths(profiles)
    spec = read_spec(spec_path)
    settings = SearchSettings(
        top=top,
        processes=processes,
        time_limit_s=time_limit_s,
        clock=clock,
        watch=watch,
    )
    measured = _accelerators(spec, profiles)
    if method is not None and (measured is not None or method not in FORMER_SOLVERS):
        raise SpecError(
            f"--solver {method}: only a plan on a profile of the reference step reads it, as one of"
            f" {', '.join(FORMER_SOLVERS)}; leave it out"
        )
    if measured is not None:
        planned = _plan_on_the_model(
            spec,
            measured,
            settings=settings,
            calibrated=calibrated,
            with_unlaunchable=with_unlaunchable,
        )
        return replace(planned, plan=with_planning_time(planned.plan, wall_s=clock() - started_s))
    refuse_unpriced(spec)
    pool = spec.cluster.pools[0]
    profile_path = pool_profile(pool, profiles)
    if profile_path is None:
        raise SpecError(
            f"cluster.pools: {pool.name!r} has no profile; measure one with `moetune profile -o "
            "DIR` and name it in the spec or with --profile DIR"
        )
    profile = read_profile(profile_path)
    engine = priced_program(spec.programs)
    residual = (
        residual
        or trial_residual(pool, profiles, engine)
        or shipped_residual(engine, profile.header.machine)
    )
    provenance = Provenance(
        moetune_version=version(),
        spec_sha256=_sha256(spec_path),
        profile_sha256={pool.name: _folder_sha256(profile_path)},
        profile_source={pool.name: _source(profile)},
        device_kind={pool.name: profile.header.machine.device_kind},
        extrapolated=(),
        residual=residual,
        notes=()
        if method is None
        else (f"--solver {method}: ignored, layouts have one solver; the next release refuses it",),
    )
    planned = _plan_on_the_step(spec, profile, residual, settings=settings, provenance=provenance)
    made = with_planning_time(planned.plan, wall_s=clock() - started_s)
    return replace(planned, plan=made, profiles={pool.name: profile_path})


def write_planned(folder: AnyPath, made: Planned) -> Plan:
    """Write what `plan_training` made, as `write_plan` of the plan's folder does."""
    from tuner.goals.train_folder import write_plan

    return write_plan(
        folder,
        made.plan,
        spec=made.spec,
        profiles=made.profiles,
        fewer=made.fewer,
        spec_yaml=made.spec_yaml,
    )


def measured_profile(
    spec: Spec, profiles: AnyPath | Sequence[AnyPath], *, calibrated: bool
) -> "MeasuredProfile | None":
    """Read the accelerator profile of a spec's only pool; None without one.

    A profile that the spec names and that was measured on processors is left aside.

    Raises:
        ProfileUnreadableError: it is missing or damaged.
        SpecError: none is of the pool's device, or a given one was measured on processors.
    """
    profiles = to_paths(profiles)
    from tuner.costs.train.measured_profile import read_measured

    path = pool_profile(spec.cluster.pools[0], profiles)
    if path is None or len(spec.cluster.pools) > 1:
        return None
    if read_header(path).machine.device_kind == "cuda":
        return read_measured(path, calibrated=calibrated)
    if profiles:
        raise SpecError(
            f"--profile {path.name}: was measured on processors, and a launch is priced on "
            "accelerators; give a profile of those"
        )
    return None


def _accelerators(spec: Spec, profiles: Sequence[Path]) -> dict[str, Path] | None:
    """Return the profiles of the pools, by name, where the analytic model prices the spec.

    None where the reference engine does: on processors, on accelerators whose profile has all that
    the engine runs, and for several pools that do not all name a device; it also refuses a profile
    that is not there. A pool without a profile is priced on its device's datasheet.
    """
    if not profiles and all(pool.profile is None for pool in spec.cluster.pools):
        return {}
    if len(spec.cluster.pools) > 1 and any(pool.device is None for pool in spec.cluster.pools):
        return None
    paths: dict[str, Path] = {}
    for pool in spec.cluster.pools:
        path = pool_profile(pool, profiles, is_only_pool=len(spec.cluster.pools) == 1)
        if path is None:
            continue
        if not holds_profile(path):
            return None
        header = read_header(path)
        if header.machine.device_kind == "cpu" or _runs_reference(spec, header):
            return None
        paths[pool.name] = path
    return paths


def priced_program(programs: Programs) -> str:
    """Return what a profile of the reference step prices: that step if named, or the first."""
    named = programs.chosen
    return REFERENCE if REFERENCE in named else named[0]


def _runs_reference(spec: Spec, header: ProfileHeader) -> bool:
    """Return whether the reference engine is requested and a profile has all its operations."""
    if not set(spec.programs.chosen) <= {REFERENCE, "torchrun"}:
        return False
    needed = {"gemm", "attention", "memory_bound", "optimizer"}
    needed |= {"grouped_gemm"} if spec.model.moe is not None else set()
    return needed <= header.tables.keys()


def _plan_on_the_step(
    spec: Spec,
    profile: Profile,
    residual: Residual,
    *,
    settings: SearchSettings,
    provenance: Provenance,
) -> Planned:
    """Plan on a profile of the reference step, and what failures make of the run."""
    from tuner.search.reference.priced_layouts import ReferenceLayouts
    from tuner.search.train.fewer_nodes import plan_without_spare
    from tuner.search.train.spare_nodes import decide_spare_nodes, with_choice

    def price(pool: "Pool") -> ReferenceLayouts:
        machine = machine_of(pool, profile, residual=residual)
        return ReferenceLayouts(pool=pool, profile=profile, machine=machine)

    def plan_one(variant: Spec, text: bytes) -> Plan:
        priced = price(variant.cluster.pools[0])
        notes = reference_notes(variant, priced.pool, profile, priced.machine)
        its = {
            "spec_sha256": hashlib.sha256(text).hexdigest(),
            "notes": (*provenance.notes, *notes),
        }
        return priced.plan(variant, settings=settings, provenance=provenance.model_copy(update=its))

    decided = decide_spare_nodes(spec, price=price, settings=settings)
    spec = decided.spec
    made, fewer = plan_without_spare(
        spec,
        plan_all=lambda variant: plan_one(variant, decided.spec_yaml),
        price=price,
        make_plan=plan_one,
        settings=settings,
    )
    made = with_choice(made, decided)
    if fewer is not None:
        fewer = replace(fewer, plan=_with_notes_and_failures(fewer.plan, spec))
    return Planned(
        plan=_with_notes_and_failures(made, spec),
        spec=spec,
        profiles={},
        fewer=fewer,
        spec_yaml=decided.spec_yaml,
    )


def _plan_on_the_model(
    spec: Spec,
    profiles: Mapping[str, Path],
    *,
    settings: SearchSettings,
    calibrated: bool,
    with_unlaunchable: bool,
) -> Planned:
    """Plan production engines on datasheets, and on profiles where pools have them."""
    from tuner.costs.train.calibration import shipped
    from tuner.costs.train.measured_profile import read_measured
    from tuner.search.nodes.node_order import read_links
    from tuner.search.nodes.to_plan import with_node_order
    from tuner.search.train.build_problem import price_pool
    from tuner.search.train.fewer_nodes import plan_without_spare
    from tuner.search.train.plan_train import make_analytic_plan
    from tuner.search.train.priced_layouts import AnalyticLayouts
    from tuner.search.train.spare_nodes import decide_spare_nodes, with_choice

    refuse_unlaunchable(spec)
    links = read_links(spec.cluster)
    residuals = shipped() if calibrated else None
    measured = {name: read_measured(path, calibrated=calibrated) for name, path in profiles.items()}

    def price(pool: "Pool") -> "PricedPool":
        return price_pool(pool, residuals=residuals, measured=measured.get(pool.name))

    def price_layouts(pool: "Pool") -> AnalyticLayouts:
        return AnalyticLayouts(priced_pool=price(pool))

    decided = decide_spare_nodes(spec, price=price_layouts, settings=settings)
    spec = decided.spec
    provenance = Provenance(
        moetune_version=version(),
        spec_sha256=decided.sha256,
        profile_sha256={name: _folder_sha256(path) for name, path in profiles.items()},
        profile_source={
            pool.name: measured[pool.name].source if pool.name in measured else "datasheet"
            for pool in spec.cluster.pools
        },
        links_sha256={
            name: hashlib.sha256(link_matrix_csv(matrix).encode()).hexdigest()
            for name, matrix in links.items()
        },
        extrapolated=(),
        notes=(
            *analytic_notes(spec, measured, calibrated=residuals is not None),
            *profile_notes(spec, measured),
        ),
    )

    def plan_all(variant: Spec) -> Plan:
        if len(variant.cluster.pools) > 1:
            from tuner.search.train.pools.plan_pools import plan_over_pools

            made = plan_over_pools(
                variant,
                residuals=residuals,
                settings=settings,
                provenance=provenance,
                measured=measured,
            )
        else:
            (pool,) = variant.cluster.pools
            made = make_analytic_plan(
                variant,
                price(pool),
                settings=settings,
                provenance=provenance,
                with_unlaunchable=with_unlaunchable,
            )
        if links:
            text = f"order of the nodes of {', '.join(links)}"
            settings.watch(PlanningEvent(stage="nodes", text=text))
        return with_node_order(
            made,
            links,
            cluster=variant.cluster,
            time_limit_s=NODE_ORDER_SHARE * settings.time_limit_s,
        )

    def plan_smaller(smaller: Spec, text: bytes) -> Plan:
        smaller_provenance = provenance.model_copy(
            update={"spec_sha256": hashlib.sha256(text).hexdigest(), "links_sha256": {}}
        )
        return make_analytic_plan(
            smaller,
            price(smaller.cluster.pools[0]),
            settings=replace(settings, watch=ignore_progress),
            provenance=smaller_provenance,
            with_unlaunchable=False,
        )

    made, fewer = plan_without_spare(
        spec, plan_all=plan_all, price=price_layouts, make_plan=plan_smaller, settings=settings
    )
    made = with_choice(made, decided)
    if fewer is not None:
        fewer = replace(fewer, plan=_with_notes_and_failures(fewer.plan, spec))
    made = _with_notes_and_failures(made, spec)
    return Planned(
        plan=made,
        spec=spec,
        profiles=profiles,
        fewer=fewer,
        spec_yaml=decided.spec_yaml,
    )


def _with_notes_and_failures(plan: Plan, spec: Spec) -> Plan:
    return with_assumptions(plan).model_copy(update={"failures": spec.failures})


def refuse_unpriced(spec: Spec) -> None:
    """Refuse what this version cannot price, and what a target of the spec cannot launch.

    Raises:
        SpecError: several pools, latent attention, documents in rows, a model or precision that a
            target lacks, or adapters beside frozen weights that a target keeps in its own way.
    """
    if len(spec.cluster.pools) > 1:
        names = ", ".join(repr(pool.name) for pool in spec.cluster.pools)
        raise SpecError(
            f"cluster.pools: {names}: a profile of the reference step plans one pool; keep one, or "
            "name each pool's 'device' and no profile"
        )
    if ModelFeature.MLA in features(spec.model):
        raise SpecError(
            f"model: {spec.model.architecture} has multi-head latent attention, which a "
            "profile of the reference step cannot price; name the pool's 'device' and no profile"
        )
    if spec.documents is not None:
        raise SpecError(
            "goal.sequence_lengths: a profile of the reference step prices whole sequences; leave"
            " it out, or name the pool's 'device' and no profile"
        )
    refuse_unlaunchable(spec)
    _refuse_unpriced_adapters(spec)


def _refuse_unpriced_adapters(spec: Spec) -> None:
    capabilities = spec.programs.capabilities()
    for target in capabilities.parts or (capabilities,):
        if spec.goal.adapters is not None and not target.frozen_in_compute_type:
            raise SpecError(
                f"goal.tune: {target.names[0]} keeps frozen weights in the adapters' type and "
                "shards them below zero_stage 3, too, which a profile of the reference step cannot "
                "price; name the pool's 'device' and no profile, or emit another target"
            )


def refuse_unlaunchable(spec: Spec) -> None:
    """Refuse a model or precision that a target lacks."""
    capabilities = spec.programs.capabilities()
    for target in capabilities.parts or (capabilities,):
        lacking = sorted(features(spec.model) & target.unsupported)
        if lacking:
            reason = dict(target.unsupported_reasons).get(lacking[0])
            raise SpecError(
                f"emit: {target.names[0]} {'is not planned for' if reason else 'cannot build'}"
                f" {lacking[0]} ({spec.model.architecture}){f': {reason}' if reason else ''}; "
                f"{_able(spec)}"
            )
        _refuse_adapters(spec, target)
        if spec.goal.precision.value not in target.precisions:
            raise SpecError(
                f"emit: {target.names[0]} has no precision {spec.goal.precision.value!r}; it has "
                f"{', '.join(sorted(target.precisions))}"
            )


def _refuse_adapters(spec: Spec, target: Capabilities) -> None:
    tune = spec.goal.adapters
    if tune is None:
        return
    present = features(spec.model)
    if tune.method in of_model(target, present).adapters:
        _refuse_tuned_model(spec, tune, target)
        _refuse_targets(spec, tune, of_model(target, present))
        _refuse_dtype(tune, target)
        return
    able = [
        name
        for name, candidate in spec.programs.known.items()
        if tune.method in of_model(candidate.capabilities, present).adapters
    ]
    of_kind = f" {spec.model.name}" if tune.method in target.adapters else ""
    raise SpecError(
        f"goal.tune.method: {target.names[0]} does not train{of_kind} by {tune.method!r}; "
        f"{', '.join(able) or 'no target'} can, or train all weights (tune: full)"
    )


def _refuse_tuned_model(spec: Spec, tune: Adapters, target: Capabilities) -> None:
    lacking = sorted(features(spec.model) & with_adapters(target, tune).unsupported)
    if lacking:
        raise SpecError(
            f"goal.tune: {target.names[0]} has no adapters beside {lacking[0]}"
            f" ({spec.model.architecture}); train all weights (tune: full)"
        )


def _refuse_targets(spec: Spec, tune: Adapters, target: Capabilities) -> None:
    names = set(adapted(tune, spec.model))
    known = target.adapter_targets
    if spec.model.architecture in target.networks_become_experts:
        known -= set(NETWORK)
    if lacking := sorted(names - known):
        able = [name for name in matrices(spec.model) if name in known]
        raise SpecError(
            f"goal.tune.targets: {target.names[0]} has no adapters of {', '.join(lacking)}; of"
            f" {spec.model.name} it has those of {', '.join(able)}"
        )
    for fused in sorted(target.fused_layers):
        present = set(fused) & set(matrices(spec.model))
        if names & present and not present <= names:
            raise SpecError(
                f"goal.tune.targets: {target.names[0]} fuses {', '.join(sorted(present))} into one"
                " layer; name all of them, or none"
            )


def _refuse_dtype(tune: Adapters, target: Capabilities) -> None:
    if tune.dtype is not None and tune.dtype not in target.adapter_dtypes:
        raise SpecError(
            f"goal.tune.dtype: {target.names[0]} keeps adapters in"
            f" {', '.join(sorted(target.adapter_dtypes))}, not {tune.dtype}; leave it out"
        )


def _able(spec: Spec) -> str:
    """List the targets that can build the model in its precision."""
    able = [
        name
        for name, target in spec.programs.known.items()
        if not features(spec.model) & target.capabilities.unsupported
        and spec.goal.precision.value in target.capabilities.precisions
    ]
    return f"targets that can: {', '.join(able)}" if able else "no target of this version can"


def _source(profile: Profile) -> str:
    return "+".join(sorted({row.source.value for row in profile.measurements})) or "empty"


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_bounded(path, most_bytes=LARGEST_FILE_BYTES)).hexdigest()


def _folder_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(path.iterdir()):
        if file.is_file():
            content = read_bounded(file, most_bytes=MAX_PROFILE_FILE_BYTES)
            digest.update(file.name.encode() + b"\0" + content)
    return digest.hexdigest()
