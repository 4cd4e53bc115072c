"""What lies in the folder of a deployment's plan beside `plan.json`.

used/spec.yaml, used/config.json    what was read
launch/<target>/                    launchers and the benchmark job
"""

from pathlib import Path

from tuner.emit.serving.registry import emit_all_serving
from tuner.plan_folder import PLAN_NAME, parsed_plan, write_folder
from tuner.serve_plan import ServePlan, VerifiedServing
from tuner.spec.serving.read import ServeSpec

WAIVED = "predicted only; nothing was launched"


def write_serve_plan(folder: Path, plan: ServePlan, *, spec: ServeSpec) -> ServePlan:
    """Write a deployment's plan and return it with its files named.

    Raises:
        OutputError: the folder cannot be written.
        SpecError: a target cannot express the decision.
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
        for target, emitted in emit_all_serving(verified).items():
            for file in emitted:
                name = f"launch/{target}/{file.path}"
                files[name] = file.content
                if file.executable:
                    executable.add(name)
    plan = plan.model_copy(update={"files": (*sorted(files), PLAN_NAME)})
    files[PLAN_NAME] = plan.model_dump_json(indent=2) + "\n"
    write_folder(folder, files, executable=frozenset(executable))
    return plan


def read_serve_plan(folder: Path) -> ServePlan:
    """Read `plan.json` of a deployment.

    Raises:
        PlanUnreadableError: it is missing or damaged.
    """
    return parsed_plan(folder, ServePlan)
