"""Placement planning as functions, for the command line and for notebooks."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from profilers.files import read_bounded
from profilers.routing.recording import Recording
from tuner.costs.place import grouped_gemms_s
from tuner.errors import PlanUnreadableError, SpecError
from tuner.goals.place_folder import read_holdout_pass, read_place_plan
from tuner.goals.place_spec import read_place_spec
from tuner.goals.profiles import pool_profile
from tuner.goals.train_plan import version
from tuner.output import write_files
from tuner.paths import AnyPath, plan_folder, to_paths
from tuner.plans.folder import VERIFIED_NAME
from tuner.plans.place import PlacePlan, PlaceProvenance
from tuner.plans.proof import with_planning_time
from tuner.prices.lookups import Lookups
from tuner.report.placement_maps import heat_maps
from tuner.search.place.plan_place import make_place_plan
from tuner.search.place.prices import place_pool, pricing_of
from tuner.search.settings import SearchSettings
from tuner.spec.cluster import Cluster
from tuner.spec.files import LARGEST_FILE_BYTES, shown_path
from tuner.spec.huggingface.read import read_model
from tuner.spec.place import Objective
from tuner.spec.place_method import FORMER
from tuner.spec.place_spec import PlaceSpec
from tuner.spec.spec_file import read_spec_keys
from tuner.verify.placement import verify_placements
from tuner.verify.placement_records import PlaceVerified

if TYPE_CHECKING:
    from tuner.costs.train.measured_profile import MeasuredProfile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """A placement's plan with its spec and heat maps."""

    plan: PlacePlan
    spec: PlaceSpec
    maps: Mapping[str, str]
    """Heat maps by file name."""


def place(
    spec_path: AnyPath,
    *,
    profiles: AnyPath | Sequence[AnyPath] = (),
    time_limit_s: float = 60.0,
    calibrated: bool = True,
    lookups: Lookups | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Placed:
    """Plan the placement that a spec describes.

    Args:
        spec_path: the YAML file.
        profiles: stored profiles of the pool's device; without one the spec's own, otherwise the
            device's datasheet prices the layers.
        time_limit_s: of all searches together.
        calibrated: whether datasheets are corrected by the residuals that ship.
        lookups: filled with the kernels whose prices are looked up.
        clock: for the time limit and the reported solve time.

    Raises:
        SpecError: the spec is unusable.
        RecordingUnreadableError: a recording is damaged.
        ProfileUnreadableError: a profile is missing or damaged.
    """
    spec_path = Path(spec_path)
    profiles = to_paths(profiles)
    from tuner.costs.train.calibration import shipped

    started_s = clock()
    spec = read_place_spec(spec_path)
    about_traffic, has_price = spec.goal.is_about_traffic, is_priced(spec)
    if profiles and (spec.cluster is None or (spec.model is None and not about_traffic)):
        raise SpecError("--profile: the spec names no model and cluster, so nothing is priced")
    priced_on = spec.cluster if has_price else None
    residuals = shipped() if calibrated else None
    profile = measured = pool = None
    if spec.cluster is not None and (about_traffic or has_price):
        profile = pool_profile(spec.cluster.pools[0], profiles)
        measured = _measured(profile, is_priced=has_price, calibrated=calibrated)
    method = read_spec_keys(spec_path)["goal"].get("method")
    ignored = (
        f"goal.method {method}: ignored, auto plans every objective; the next release refuses it",
    ) * (method in FORMER)
    spec_sha256 = hashlib.sha256(read_bounded(spec_path, most_bytes=LARGEST_FILE_BYTES))
    provenance = PlaceProvenance(
        moetune_version=version(),
        spec_sha256=spec_sha256.hexdigest(),
        recording_sha256={name: _sha256(recording) for name, recording in spec.recordings.items()},
        notes=(*ignored, *_price_notes(priced_on, measured)),
    )
    try:
        if spec.cluster is not None:
            pool = place_pool(
                spec.cluster,
                spec.goal,
                profile=profile,
                residuals=residuals,
                measured=measured,
                lookups=lookups,
            )
        made = make_place_plan(
            spec,
            pool=pool,
            settings=SearchSettings(time_limit_s=time_limit_s, clock=clock),
            provenance=provenance,
        )
    except SpecError as error:
        # A refusal of the planner is about a value of the spec, like one of the reader.
        raise SpecError(f"{shown_path(spec_path)}: {error}") from error
    made = with_planning_time(made, wall_s=clock() - started_s)
    return Placed(plan=made, spec=spec, maps=heat_maps(spec, made))


def is_priced(spec: PlaceSpec) -> bool:
    """Return whether expert layers are priced, given a cluster.

    Tokens of a chain stay on their last expert's rank: links are priced, expert layers are not.
    """
    return spec.model is not None and spec.goal.objective is not Objective.LAYER_CHAIN


def _sha256(recording: Recording) -> str:
    """Hash every array of a recording."""
    digest = hashlib.sha256()
    for field in fields(recording):
        value = getattr(recording, field.name)
        if isinstance(value, np.ndarray):
            digest.update(f"{field.name} {value.dtype} {value.shape}\n".encode())
            digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()


def _measured(
    profile: Path | None, *, is_priced: bool, calibrated: bool
) -> "MeasuredProfile | None":
    """Read a profile of accelerators; a processor's has measured links, and prices no layers."""
    from profilers.store import read_header
    from tuner.costs.train.measured_profile import read_measured

    if profile is None:
        return None
    if read_header(profile).machine.device_kind == "cuda":
        return read_measured(profile, calibrated=calibrated)
    if is_priced:
        raise SpecError(
            f"{profile}: was measured on processors, and expert layers are priced on accelerators;"
            " name a 'device' in the pool, or a profile of one"
        )
    return None


def _price_notes(cluster: Cluster | None, measured: "MeasuredProfile | None") -> tuple[str, ...]:
    if cluster is None:
        return ()
    pool = cluster.pools[0]
    source = "its profile" if measured is not None else f"the datasheet of {pool.device}"
    notes = (f"time is priced on pool {pool.name!r}, from {source}",)
    others = f"all ranks are on pool {pool.name!r}; the other pools are not used"
    return (*notes, others) if len(cluster.pools) > 1 else notes


def verify_place(folder: AnyPath, *, budget_s: float, device_kind: str = "auto") -> PlaceVerified:
    """Run the expert GEMMs of a plan and its alternatives at recorded loads, on one device.

    Args:
        folder: of the plan; `verified.json` is written into it.
        budget_s: for all measurements.
        device_kind: auto, cpu or cuda.

    Raises:
        PlanUnreadableError: the plan is damaged, or names no model.
        ProfileUnreadableError: the profile that the pool names is gone.
        RankError: the device has no room, or is too slow.
        OutputError: the folder cannot be written.
    """
    folder = plan_folder(folder)
    from tuner.costs.train.calibration import shipped

    made = read_place_plan(folder)
    if made.decision is None:
        raise PlanUnreadableError(f"{folder}: the plan placed nothing ({made.binding_constraint})")
    config = folder / "used" / "config.json"
    if not config.is_file():
        raise PlanUnreadableError(
            f"{folder}: the plan names no model, so the experts have no size; add `model` to"
            " spec.yaml and plan anew"
        )
    model = read_model(config)
    ffn = None if model.moe is None else model.moe.expert_ffn_size
    if ffn is None:
        raise PlanUnreadableError(f"{config}: {model.name} has no experts")
    workloads = made.goal.workloads
    heaviest = max(range(len(workloads)), key=lambda number: workloads[number].weight)

    from profilers.kernels.expert_loads import time_expert_loads

    time_loads = partial(
        time_expert_loads,
        hidden=model.expert_hidden,
        ffn=ffn,
        is_gated=model.ffn_is_gated,
        budget_s=budget_s,
        device_kind=device_kind,
    )
    cluster, pricing = made.cluster, None
    if cluster is not None:
        measured = _measured(pool_profile(cluster.pools[0], ()), is_priced=True, calibrated=True)
        pool = place_pool(cluster, made.goal, residuals=shipped(), measured=measured)
        pricing = pricing_of(model, pool, made.goal)
    verified = verify_placements(
        {
            "plan": made.decision,
            **{alternative.method: alternative.decision for alternative in made.alternatives},
        },
        load_LE=read_holdout_pass(folder, heaviest),
        time_loads=time_loads,
        price_loads=None
        if pricing is None
        else lambda rows, active: grouped_gemms_s(pricing.machine, copies=rows, active=active),
    )
    note = f"rows of one hold-out pass of {workloads[heaviest].name!r}"
    verified = verified.model_copy(update={"notes": (note, *verified.notes)})
    write_files(folder, {VERIFIED_NAME: verified.model_dump_json(indent=2) + "\n"})
    return verified
