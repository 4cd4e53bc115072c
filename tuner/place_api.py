"""Placements as functions: what the command line calls and a notebook can call too."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.api import version
from tuner.errors import SpecError
from tuner.place_plan import PlacePlan, PlaceProvenance
from tuner.planner.place.planning import Settings, make_place_plan
from tuner.planner.place.pricing import pricing_of
from tuner.profiles import profile_of
from tuner.report.placement_maps import heat_maps
from tuner.spec.place_read import PlaceSpec, read_place_spec

if TYPE_CHECKING:
    from tuner.costs.analytic.measured_profile import MeasuredProfile


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """A placement's plan, what it was made from, and its heat maps."""

    plan: PlacePlan
    spec: PlaceSpec
    maps: Mapping[str, str]
    """By file name."""


def place(
    spec_path: Path,
    *,
    profiles: Sequence[Path] = (),
    time_limit_s: float = 60.0,
    calibrated: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> Placed:
    """Plan the placement that a spec describes.

    Args:
        spec_path: the YAML file.
        profiles: stored profiles of the pool's device; without one the spec's own, otherwise the
            device's datasheet prices the layers.
        time_limit_s: for all searches together.
        calibrated: whether datasheets are corrected by the residuals that ship.
        clock: for the time limit and the reported solve time.

    Raises:
        SpecError: the spec is unusable.
        RecordingUnreadableError: a recording is damaged.
        ProfileUnreadableError: a profile is missing or damaged.
    """
    from tuner.costs.analytic.calibration import shipped

    spec = read_place_spec(spec_path)
    measured = _measured(spec, profiles, calibrated=calibrated)
    pricing = pricing_of(spec, residuals=shipped() if calibrated else None, measured=measured)
    made = make_place_plan(
        spec,
        pricing=pricing,
        settings=Settings(time_limit_s=time_limit_s, clock=clock),
        provenance=PlaceProvenance(
            moetune_version=version(),
            spec_sha256=hashlib.sha256(spec_path.read_bytes()).hexdigest(),
            recording_sha256={
                name: hashlib.sha256(recording.count_PLE.tobytes()).hexdigest()
                for name, recording in spec.recordings.items()
            },
        ),
    )
    return Placed(plan=made, spec=spec, maps=heat_maps(spec, made))


def _measured(
    spec: PlaceSpec, profiles: Sequence[Path], *, calibrated: bool
) -> "MeasuredProfile | None":
    if spec.cluster is None or spec.model is None:
        if profiles:
            raise SpecError("--profile: the spec names no model and cluster, so nothing is priced")
        return None
    from profilers.store import read_header
    from tuner.costs.analytic.measured_profile import read_measured

    path = profile_of(spec.cluster.pools[0], profiles)
    if path is None:
        return None
    if read_header(path).machine.device_kind != "cuda":
        raise SpecError(
            f"{path}: was measured on processors, and expert layers are priced on accelerators;"
            " name a 'device' in the pool, or a profile of one"
        )
    return read_measured(path, calibrated=calibrated)
