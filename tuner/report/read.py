"""Reader that turns a plan's folder into its report; prices nothing."""

from pathlib import Path
from typing import Any

from tuner.errors import PlanUnreadableError
from tuner.goals.place_folder import read_place_plan
from tuner.goals.train_folder import read_plan
from tuner.plans.folder import PLAN_NAME, TRIALS_NAME, read_plan_as, read_verified_as
from tuner.plans.place import PlacePlan
from tuner.plans.serve import ServePlan
from tuner.plans.train import Plan
from tuner.report.content import Evidence, Report
from tuner.report.launch_section import read_launch_files
from tuner.report.place_page import place_report
from tuner.report.placement_maps import read_heat_maps
from tuner.report.serve_page import serve_report
from tuner.report.train_page import train_report
from tuner.verify.deployments.records import ServeVerified
from tuner.verify.placement_records import PlaceVerified
from tuner.verify.records import Verified, read_trials


def train_report_of(folder: Path, **solved: Any) -> Report:
    """Report on a training plan, with its trials if there are any; `solved` is new evidence.

    Raises:
        PlanUnreadableError: there is no plan, or a file beside it is damaged.
    """
    plan = read_plan(folder)
    _check(folder, plan)
    trials = read_trials(folder / TRIALS_NAME)
    return train_report(plan, _evidence(folder, plan, Verified, trials=trials, **solved))


def serve_report_of(folder: Path, **solved: Any) -> Report:
    """Report on a deployment, with its trials if there are any; `solved` is new evidence.

    Raises:
        PlanUnreadableError: there is no plan, or a file beside it is damaged.
    """
    plan = read_plan_as(folder, ServePlan)
    return serve_report(plan, _evidence(folder, plan, ServeVerified, **solved))


def place_report_of(folder: Path, **solved: Any) -> Report:
    """Report on a placement, with its measurement if there is one; `solved` is new evidence.

    Raises:
        PlanUnreadableError: there is no plan, or a file beside it is damaged.
    """
    plan = read_place_plan(folder)
    maps = read_heat_maps(folder, plan.files)
    return place_report(plan, _evidence(folder, plan, PlaceVerified, maps=maps, **solved))


def _evidence(
    folder: Path, plan: Plan | ServePlan | PlacePlan, kind: type[Any], **more: Any
) -> Evidence:
    files = read_launch_files(folder, plan.files)
    return Evidence(verified=read_verified_as(kind, folder), files=files, **more)


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
    if len(predicted.stages) != decision.num_stages or any(len(own) != ranks for own in by_rank):
        raise PlanUnreadableError(
            f"{folder / PLAN_NAME}: predicted: not of the decision's {decision.num_stages} stages "
            f"on {ranks} pipeline ranks; plan again"
        )
