"""Reader that turns a plan's folder into its report; prices nothing."""

from pathlib import Path
from typing import Any

from tuner.errors import PlanUnreadableError
from tuner.goals.place_folder import read_place_plan
from tuner.goals.train_folder import read_plan
from tuner.plans.folder import PLAN_NAME, TRIALS_NAME, read_plan_as, read_verified_as
from tuner.plans.serve import ServePlan
from tuner.plans.train import Plan
from tuner.report.content import Report, Section
from tuner.report.launch_section import read_launch_files
from tuner.report.place_page import PlaceEvidence, place_report
from tuner.report.placement_maps import read_heat_maps
from tuner.report.replay import Replay
from tuner.report.serve_page import ServeEvidence, serve_report
from tuner.report.train_page import TrainEvidence, train_report
from tuner.verify.deployments.records import ServeVerified
from tuner.verify.placement_records import PlaceVerified
from tuner.verify.records import Verified, read_trials


def train_report_of(folder: Path, *, what_if: Section | None = None, **_other: Any) -> Report:
    """Report on a training plan, with its trials if there are any.

    Raises:
        PlanUnreadableError: there is no plan, or a file beside it is damaged.
    """
    plan = read_plan(folder)
    _check(folder, plan)
    evidence = TrainEvidence(
        verified=read_verified_as(Verified, folder),
        trials=read_trials(folder / TRIALS_NAME),
        files=read_launch_files(folder, plan.files),
        what_if=what_if,
    )
    return train_report(plan, evidence)


def serve_report_of(
    folder: Path, *, what_if: Section | None = None, replay: Replay | None = None
) -> Report:
    """Report on a deployment, with its trials and the repeated simulation of its traffic.

    Raises:
        PlanUnreadableError: there is no plan, or a file beside it is damaged.
    """
    plan = read_plan_as(folder, ServePlan)
    evidence = ServeEvidence(
        files=read_launch_files(folder, plan.files),
        replay=replay,
        what_if=what_if,
        verified=read_verified_as(ServeVerified, folder),
    )
    return serve_report(plan, evidence)


def place_report_of(folder: Path, *, what_if: Section | None = None, **_other: Any) -> Report:
    """Report on a placement, with its measurement if there is one.

    Raises:
        PlanUnreadableError: there is no plan, or a file beside it is damaged.
    """
    plan = read_place_plan(folder)
    evidence = PlaceEvidence(
        maps=read_heat_maps(folder, plan.files),
        files=read_launch_files(folder, plan.files),
        verified=read_verified_as(PlaceVerified, folder),
        what_if=what_if,
    )
    return place_report(plan, evidence)


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
