"""Files beside `plan.json` in the folder of a training plan (tuner/plans/folder.py).

    used/         the spec, the model's config, the routing record, the failure log's counts, the
                  lengths of documents in `lengths.csv`, the link matrix of pool N in
                  `links-N.csv`, and the profile in `profile/`; where several pools have one, each
                  in `profiles/N/` with N the pool's position in the spec, from 0
    fewer-nodes/  a folder of the same kind, of the layout for one node less; only where the job
                  goes on without a spare node

Everything but `trials/` can be derived again from the other files.
"""

from collections.abc import Mapping
from pathlib import Path

from profilers.files import read_bounded
from profilers.imports.link_matrix import link_matrix_csv, read_link_matrix
from profilers.records import Profile
from profilers.store import read_profile
from tuner.engines.files import LaunchFiles, launch_files
from tuner.engines.writers import emit_all
from tuner.output import write_files
from tuner.paths import AnyPath
from tuner.plans.folder import (
    FEWER_NODES,
    VERIFIED_NAME,
    model_config,
    plan_files,
    read_plan_as,
    used_profiles,
    write_plan_folder,
)
from tuner.plans.train import Plan, VerifiedPlan
from tuner.search.train.fewer_nodes import FewerNodesPlan
from tuner.spec.documents import LengthFile
from tuner.spec.files import LARGEST_FILE_BYTES
from tuner.spec.length_files import lengths_csv
from tuner.spec.routing import routing_json
from tuner.spec.spec import Spec
from tuner.verify.records import Verified


def write_plan(
    folder: AnyPath,
    plan: Plan,
    *,
    spec: Spec,
    profiles: Mapping[str, AnyPath],
    fewer: FewerNodesPlan | None = None,
    spec_yaml: bytes | None = None,
) -> Plan:
    """Write a new plan and everything that it used; return it with its files named.

    Args:
        folder: may hold an earlier plan, which is replaced.
        plan: what to write.
        spec: that it was made from.
        profiles: folders of the stored profiles that it used, by pool; none where it rests on
            datasheets.
        fewer: its layout for one node less, which is written into the same folder; None: it has
            none.
        spec_yaml: the spec's file; None: the one it was read from.

    Raises:
        OutputError: the folder cannot be written.
    """
    files = _files(plan, spec, profiles=profiles, spec_yaml=spec_yaml)
    inside = _fewer_files(fewer, profiles=profiles)
    return write_plan_folder(
        Path(folder),
        plan,
        {**files.contents, **inside.contents},
        executable=files.executable | inside.executable,
    )


def _fewer_files(fewer: FewerNodesPlan | None, *, profiles: Mapping[str, AnyPath]) -> LaunchFiles:
    """Return the files of the layout for one node less, by path relative to the plan's folder."""
    if fewer is None:
        return LaunchFiles(contents={}, executable=frozenset())
    files = _files(fewer.plan, fewer.spec, profiles=profiles, spec_yaml=fewer.spec_yaml)
    _, contents = plan_files(fewer.plan, files.contents)
    return LaunchFiles(
        contents={f"{FEWER_NODES}/{name}": content for name, content in contents.items()},
        executable=frozenset(f"{FEWER_NODES}/{name}" for name in files.executable),
    )


def _files(
    plan: Plan, spec: Spec, *, profiles: Mapping[str, AnyPath], spec_yaml: bytes | None = None
) -> LaunchFiles:
    """Return what lies beside a plan, by path relative to its folder."""
    used = _used(spec) if spec_yaml is None else _used(spec) | {"spec.yaml": spec_yaml}
    files: dict[str, str | bytes] = {f"used/{name}": data for name, data in used.items()}
    files |= used_profiles(spec.cluster, profiles)
    if plan.decision is None:
        return LaunchFiles(contents=files, executable=frozenset())
    waived = VerifiedPlan.waive(plan, reason="no trial was launched yet; run moetune verify")
    launch = launch_files(emit_all(waived))
    return LaunchFiles(contents={**files, **launch.contents}, executable=launch.executable)


def read_plan(folder: Path) -> Plan:
    """Read `plan.json` of a plan's folder.

    Raises:
        PlanUnreadableError: it is missing or damaged.
    """
    return read_plan_as(folder, Plan)


def read_used_profile(folder: Path) -> Profile:
    """Read the copy of the profile that the plan was made from.

    Raises:
        ProfileUnreadableError: it is missing or damaged.
    """
    return read_profile(folder / "used" / "profile")


def write_verified(folder: Path, verified: Verified, *, launch: LaunchFiles | None) -> None:
    """Write the conclusion, and the launch files made from it.

    Raises:
        OutputError: the folder cannot be written.
    """
    files: dict[str, str | bytes] = dict(launch.contents) if launch else {}
    files[VERIFIED_NAME] = verified.model_dump_json(indent=2) + "\n"
    write_files(folder, files, executable=launch.executable if launch else frozenset())


def _used(spec: Spec) -> dict[str, bytes]:
    used = {
        "spec.yaml": read_bounded(spec.path, most_bytes=LARGEST_FILE_BYTES),
        "config.json": model_config(spec.model_path),
    }
    if spec.goal.routing is not None:
        used["routing.json"] = routing_json(spec.goal.routing.path)
    if spec.documents is not None and isinstance(spec.goal.sequence_lengths, LengthFile):
        used["lengths.csv"] = lengths_csv(spec.documents).encode()
    if spec.failures is not None:
        used["failures.json"] = spec.failures.model_dump_json().encode()
    for number, pool in enumerate(spec.cluster.pools):
        if pool.link_matrix is not None:
            text = link_matrix_csv(read_link_matrix(pool.link_matrix))
            used[f"links-{number}.csv"] = text.encode()
    return used
