"""Reader that turns a plan's folder into its report; prices nothing."""

from importlib import import_module
from pathlib import Path
from typing import Any

from tuner.errors import PlanUnreadableError
from tuner.plans.folder import PLAN_NAME, TRIALS_NAME, read_verified_as
from tuner.plans.place import PlacePlan
from tuner.plans.serve import ServePlan
from tuner.plans.train import Plan
from tuner.report.content import NO_EVIDENCE, Evidence, Report
from tuner.report.launch_section import read_launch_files
from tuner.report.placement_maps import read_heat_maps
from tuner.verify.records import TrialRecord, read_trials

StoredPlan = Plan | ServePlan | PlacePlan


def report_on(plan: StoredPlan, evidence: Evidence = NO_EVIDENCE) -> Report:
    """Build the report on a plan of any goal; the module of its page is imported for it."""
    kind = plan.goal.kind
    page = getattr(import_module(f"tuner.report.{kind}_page"), f"{kind}_report")
    report: Report = page(plan, evidence)
    return report


def read_report(folder: Path, plan: StoredPlan, *, verified: type[Any], **solved: Any) -> Report:
    """Report on the plan of a folder with what lies beside it.

    Args:
        folder: of the plan.
        plan: read from there.
        verified: type of the goal's conclusion.
        solved: new evidence.

    Raises:
        PlanUnreadableError: the plan, or a file beside it, is damaged.
    """
    trials: tuple[TrialRecord, ...] = ()
    if isinstance(plan, Plan):
        _check(folder, plan)
        trials = read_trials(folder / TRIALS_NAME)
    evidence = Evidence(
        verified=read_verified_as(verified, folder),
        trials=trials,
        files=read_launch_files(folder, plan.files),
        maps=read_heat_maps(folder, plan.files),
        **solved,
    )
    return report_on(plan, evidence)


def _check(folder: Path, plan: Plan) -> None:
    """Refuse a plan whose decision and prediction have different numbers of stages.

    Raises:
        PlanUnreadableError: they do.
    """
    decision, predicted = plan.decision, plan.predicted
    if decision is None or predicted is None:
        return
    by_rank = (
        predicted.peak_memory_bytes,
        predicted.peak_memory_bytes_band,
        predicted.activation_bytes,
    )
    ranks = decision.pipeline_model_parallel_size
    if len(predicted.stages) != decision.num_stages or any(
        len(values) != ranks for values in by_rank
    ):
        raise PlanUnreadableError(
            f"{folder / PLAN_NAME}: predicted: not of the decision's {decision.num_stages} stages "
            f"on {ranks} pipeline ranks; plan again"
        )
