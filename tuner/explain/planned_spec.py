"""The spec that a plan was made from, read back from its folder, ready to be changed.

It is the spec's keys with every path made absolute: to the copies in `used/` where there are any,
else to the original file. The copies hold all inputs of a training plan. The recorded trace of a
deployment and the recordings of a placement stay where they were: without them nothing can be
solved again, and the error names the missing file.

Not stored with a plan, so to be given again: the tables that a deployment or placement was priced
with by `--profile`, and `--uncalibrated`.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from profilers.files import read_bounded
from tuner.costs.residuals import Residual
from tuner.errors import PlanUnreadableError
from tuner.goals.place_folder import read_place_plan
from tuner.goals.serve_folder import read_serve_plan
from tuner.goals.train_folder import plan_kind, read_plan
from tuner.paths import AnyPath, plan_folder
from tuner.plans.place import PlacePlan
from tuner.plans.serve import ServePlan
from tuner.plans.train import Plan
from tuner.spec.cluster import Cluster
from tuner.spec.files import LARGEST_FILE_BYTES
from tuner.spec.spec_file import read_spec_keys

Kind = Literal["train", "serve", "place"]
StoredPlan = Plan | ServePlan | PlacePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSpec:
    """A spec that can be planned on from anywhere."""

    kind: Kind
    keys: Mapping[str, Any]
    """Of the YAML file, paths absolute; never changed in place."""
    cluster: Cluster | None
    """The planned cluster; None where a placement names none."""
    is_reference: bool = False
    """Priced on a profile of the reference step, which has no datasheet's links."""
    residual: Residual | None = None
    """Correction of its predictions."""
    memory_bytes: Mapping[str, int]
    """Of one device, by pool, where only a profile states it."""


def read_any_plan(folder: AnyPath) -> StoredPlan:
    """Read the plan of a folder, whatever its goal.

    Raises:
        PlanUnreadableError: it is missing or damaged.
    """
    folder = plan_folder(folder)
    kind = plan_kind(folder)
    if kind == "serve":
        return read_serve_plan(folder)
    if kind == "place":
        return read_place_plan(folder)
    return read_plan(folder)


def read_planned_spec(folder: Path, plan: StoredPlan) -> PlannedSpec:
    """Read back the spec that the plan of a folder was made from.

    Raises:
        PlanUnreadableError: the folder no longer holds its spec as it was.
    """
    spec_path = folder / "used" / "spec.yaml"
    if not spec_path.is_file():
        raise PlanUnreadableError(
            f"{folder} holds no used/spec.yaml, so nothing can be solved again; plan anew"
        )
    if (
        hashlib.sha256(read_bounded(spec_path, most_bytes=LARGEST_FILE_BYTES)).hexdigest()
        != plan.provenance.spec_sha256
    ):
        raise PlanUnreadableError(
            f"{spec_path} is not the spec that the plan was made from; plan anew"
        )
    keys = read_spec_keys(spec_path)
    used = spec_path.parent.absolute()
    if keys.get("model") is not None:
        keys["model"] = str(used / "config.json")
    if isinstance(plan, Plan):
        return _training(plan, keys, used)
    if isinstance(plan, ServePlan):
        return _deployment(plan, keys)
    return _placement(plan, keys, used)


def _training(plan: Plan, keys: dict[str, Any], used: Path) -> PlannedSpec:
    measured = plan.provenance.profile_sha256
    for position, pool in enumerate(_pools(keys)):
        pool.pop("profile", None)
        if pool.get("name") in measured:
            is_only = len(measured) == 1
            pool["profile"] = str(used / ("profile" if is_only else f"profiles/{position}"))
        if "link_matrix" in pool:
            pool["link_matrix"] = str(used / f"links-{position}.csv")
    goal = keys["goal"]
    if goal.get("routing"):
        goal["routing"] = {**goal["routing"], "path": str(used / "routing.json")}
    return PlannedSpec(
        kind="train",
        keys=keys,
        cluster=plan.cluster,
        is_reference=bool(plan.provenance.device_kind),
        residual=plan.provenance.residual,
        memory_bytes=_measured_memory(keys) if plan.provenance.device_kind else {},
    )


def _deployment(plan: ServePlan, keys: dict[str, Any]) -> PlannedSpec:
    goal, stored = keys["goal"], plan.goal
    if stored.traffic.trace is not None:
        goal["traffic"]["trace"] = str(stored.traffic.trace.absolute())
    if stored.routing is not None:
        goal["routing"]["path"] = str(stored.routing.path.absolute())
    if stored.placement is not None:
        goal["placement"] = str(stored.placement.absolute())
    _profiles_as_planned(keys, plan.cluster)
    return PlannedSpec(kind="serve", keys=keys, cluster=plan.cluster, memory_bytes={})


def _placement(plan: PlacePlan, keys: dict[str, Any], used: Path) -> PlannedSpec:
    goal = keys["goal"]
    for written, workload in zip(goal["workloads"], plan.goal.workloads, strict=True):
        written["path"] = str(workload.path.absolute())
    if plan.goal.current is not None:
        goal["current"] = str(used / f"current{plan.goal.current.suffix}")
    if plan.cluster is not None:
        _profiles_as_planned(keys, plan.cluster)
    return PlannedSpec(kind="place", keys=keys, cluster=plan.cluster, memory_bytes={})


def _profiles_as_planned(keys: dict[str, Any], cluster: Cluster) -> None:
    for written, pool in zip(_pools(keys), cluster.pools, strict=True):
        if pool.profile is not None:
            written["profile"] = str(pool.profile.absolute())


def _pools(keys: Mapping[str, Any]) -> list[dict[str, Any]]:
    cluster = keys.get("cluster") or {}
    pools: list[dict[str, Any]] = cluster.get("pools", [])
    return pools


def _measured_memory(keys: Mapping[str, Any]) -> dict[str, int]:
    from profilers.store import read_header

    return {
        pool["name"]: read_header(Path(pool["profile"])).machine.memory_bytes_per_device
        for pool in _pools(keys)
        if "profile" in pool
    }
