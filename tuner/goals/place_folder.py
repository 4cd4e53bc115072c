"""The folder of a placement's plan.

    used/spec.yaml, used/config.json, used/current.*     inputs
    used/links-0.csv                                     the first pool's link matrix
    used/routing/<n>.json                                totals of each workload, one hold-out pass
    launch/<engine>/                                     the placement as the engine reads it
    report/heat_map_<n>.json                             load by layer and rank, before and after

Recordings can be large and stay where they are; the plan holds their paths and hashes.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from profilers.files import read_bounded
from profilers.imports.link_matrix import link_matrix_csv, read_link_matrix
from solvers.placement.ranks import Floats
from tuner.engines.files import LaunchFiles, launch_files
from tuner.engines.place_writers import emit_placement
from tuner.errors import PlanUnreadableError, SpecError
from tuner.paths import AnyPath
from tuner.plans.folder import (
    MAX_PLAN_BYTES,
    model_config,
    read_plan_as,
    write_plan_folder,
)
from tuner.plans.place import PlacePlan, VerifiedPlacement
from tuner.search.place.evidence import split_recordings
from tuner.spec.current_placement import LARGEST_BYTES
from tuner.spec.files import LARGEST_FILE_BYTES, read_json_object
from tuner.spec.place_spec import PlaceSpec

WAIVED = "evaluated on recorded passes only; nothing was launched"


def write_place_plan(
    folder: AnyPath, plan: PlacePlan, *, spec: PlaceSpec, maps: Mapping[str, str]
) -> PlacePlan:
    """Write a placement's plan and return it with its files named.

    Args:
        folder: may hold an earlier plan, which is replaced.
        plan: what to write.
        spec: that it was made from.
        maps: heat maps, by file name.

    Raises:
        OutputError: the folder cannot be written.
        SpecError: an engine cannot take the placement.
    """
    folder = Path(folder)
    files: dict[str, str | bytes] = {f"used/{name}": data for name, data in _used(spec).items()}
    files |= {f"report/{name}": text for name, text in maps.items()}
    launch = LaunchFiles(contents={}, executable=frozenset())
    if plan.decision is not None:
        verified = VerifiedPlacement(plan=plan, decision=plan.decision, waived=WAIVED)
        launch = launch_files(
            {target: emit_placement(target, verified) for target in dict.fromkeys(plan.emit)}
        )
    return write_plan_folder(
        folder, plan, {**files, **launch.contents}, executable=launch.executable
    )


def read_place_plan(folder: Path) -> PlacePlan:
    """Read `plan.json` of a placement.

    Raises:
        PlanUnreadableError: it is missing or damaged.
    """
    return read_plan_as(folder, PlacePlan)


def read_holdout_pass(folder: Path, number: int) -> Floats:
    """Read back the hold-out pass of a workload, [L][E], by its position in the spec.

    Raises:
        PlanUnreadableError: it is missing or damaged.
    """
    file = folder / "used" / "routing" / f"{number}.json"
    try:
        values = read_json_object(file, what="hold-out pass", most_bytes=MAX_PLAN_BYTES)
        return np.array(values["judged_pass"], dtype=np.float64)
    except (SpecError, KeyError, ValueError) as error:
        raise PlanUnreadableError(f"{file}: holds no hold-out pass; plan anew") from error


def _used(spec: PlaceSpec) -> dict[str, str | bytes]:
    # Of each workload the hold-out pass of median size.
    typical = {
        workload.name: sorted(workload.holdout_PLE, key=np.sum)[len(workload.holdout_PLE) // 2]
        for workload in split_recordings(spec)
    }
    used: dict[str, str | bytes] = {
        "spec.yaml": read_bounded(spec.path, most_bytes=LARGEST_FILE_BYTES)
    }
    if spec.model_path is not None:
        used["config.json"] = model_config(spec.model_path)
    if spec.goal.current is not None:
        used[f"current{spec.goal.current.suffix}"] = read_bounded(
            spec.goal.current, most_bytes=LARGEST_BYTES
        )
    pool = None if spec.cluster is None else spec.cluster.pools[0]
    if pool is not None and pool.link_matrix is not None:
        used["links-0.csv"] = link_matrix_csv(read_link_matrix(pool.link_matrix))
    for number, (name, recording) in enumerate(spec.recordings.items()):
        record = {
            "model": recording.model,
            "domain": name,
            "num_logical_experts": recording.num_experts,
            "top_k": recording.top_k,
            "layer_ids": list(recording.layer_ids),
            "logical_count": recording.count_LE.tolist(),
            "judged_pass": np.rint(typical[name]).astype(int).tolist(),
        }
        used[f"routing/{number}.json"] = json.dumps(record) + "\n"
    return used
