"""What lies in the folder of a deployment's plan beside `plan.json`.

used/spec.yaml, used/config.json    what was read
used/placement.json                 the plan of the placement that is served, where the goal has one
launch/<target>/                    launchers and the benchmark job
"""

from pathlib import Path

from tuner.emit.serving.registry import emit_all_serving
from tuner.errors import PlanUnreadableError
from tuner.place_plan import PlacePlan, VerifiedPlacement
from tuner.plan_folder import PLAN_NAME, parsed_plan, write_folder
from tuner.serve_plan import ServePlan, VerifiedServing
from tuner.spec.serving.read import ServeSpec

WAIVED = "predicted only; nothing was launched"
UNJUDGED = "served as it was planned; its own verification is not part of this plan"


def write_serve_plan(folder: Path, plan: ServePlan, *, spec: ServeSpec) -> ServePlan:
    """Write a deployment's plan and return it with its files named.

    Raises:
        OutputError: the folder cannot be written.
        SpecError: a target cannot express the decision, or the placement.
        PlanUnreadableError: the placement's plan is damaged.
    """
    config = spec.model_path
    files: dict[str, str | bytes] = {
        "used/spec.yaml": spec.path.read_bytes(),
        "used/config.json": (config / "config.json" if config.is_dir() else config).read_bytes(),
    }
    executable = set()
    if plan.decision is not None and plan.predicted is not None:
        verified = VerifiedServing(
            plan=plan, decision=plan.decision, predicted=plan.predicted, waived=WAIVED
        )
        placement = _placement(spec)
        if placement is not None:
            files["used/placement.json"] = placement.plan.model_dump_json(indent=2) + "\n"
        for target, emitted in emit_all_serving(verified, placement=placement).items():
            for file in emitted:
                name = f"launch/{target}/{file.path}"
                files[name] = file.content
                if file.executable:
                    executable.add(name)
    plan = plan.model_copy(update={"files": (*sorted(files), PLAN_NAME)})
    files[PLAN_NAME] = plan.model_dump_json(indent=2) + "\n"
    write_folder(folder, files, executable=frozenset(executable))
    return plan


def _placement(spec: ServeSpec) -> VerifiedPlacement | None:
    """Return the placement that the goal names, as it was planned."""
    path = spec.goal.placement
    if path is None:
        return None
    plan = parsed_plan(path if path.is_dir() else path.parent, PlacePlan)
    if plan.decision is None:
        raise PlanUnreadableError(f"{path}: the plan decides nothing; relax its goal")
    return VerifiedPlacement(plan=plan, decision=plan.decision, waived=UNJUDGED)


def read_serve_plan(folder: Path) -> ServePlan:
    """Read `plan.json` of a deployment.

    Raises:
        PlanUnreadableError: it is missing or damaged.
    """
    return parsed_plan(folder, ServePlan)
