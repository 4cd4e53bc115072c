"""The spec that a plan was made from, read back from its folder, ready to be changed.

It is the spec's keys with every path made absolute: to the copies in `used/` where there are any,
else to the original file. The copies hold all inputs of a training plan. The recorded trace of a
deployment and the recordings of a placement stay where they were: without them nothing can be
solved again, and the error names the missing file.

Not stored with a plan, so to be given again: the tables that a deployment or placement was priced
with by `--profile`, and `--uncalibrated`.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from profilers.files import read_bounded
from tuner.errors import PlanUnreadableError
from tuner.goals.goal import PlannedSpec, PlanT
from tuner.spec.files import LARGEST_FILE_BYTES
from tuner.spec.spec_file import Keys, read_spec_keys


def read_planned_spec(
    folder: Path, plan: PlanT, spec: Callable[[PlanT, Keys, Path], PlannedSpec]
) -> PlannedSpec:
    """Read back the spec that the plan of a folder was made from; `spec` is that of its goal.

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
    return spec(plan, keys, used)
