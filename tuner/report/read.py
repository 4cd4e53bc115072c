"""From a plan's folder to its report; prices nothing."""

from dataclasses import dataclass
from pathlib import Path

from tuner.errors import PlanUnreadableError
from tuner.goals.place_folder import read_place_plan
from tuner.goals.train_folder import (
    PLAN_NAME,
    TRIALS_NAME,
    plan_kind,
    read_plan,
    read_plan_as,
    read_verified,
    read_verified_as,
)
from tuner.plans.serve import ServePlan
from tuner.plans.train import Plan
from tuner.plans.what_if import Change, WhatIf
from tuner.report.content import Report, Section
from tuner.report.launch_section import read_launch_files
from tuner.report.place_page import PlaceEvidence, place_report
from tuner.report.placement_maps import read_heat_maps
from tuner.report.replay import Replay
from tuner.report.serve_page import ServeEvidence, serve_report
from tuner.report.train_page import TrainEvidence, train_report
from tuner.report.what_if_curves import what_if_section
from tuner.verify.deployments.records import ServeVerified
from tuner.verify.placement_records import PlaceVerified
from tuner.verify.records import read_trials


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfEvidence:
    """Results under other limits."""

    changes: tuple[Change, ...]
    result: WhatIf


def build_report(
    folder: Path, *, what_if: WhatIfEvidence | None = None, replay: Replay | None = None
) -> Report:
    """Report on the plan of a folder, with its trials if there are any.

    Args:
        folder: of the plan.
        what_if: results under other limits.
        replay: the repeated simulation of a deployment's traffic.

    Raises:
        PlanUnreadableError: there is no plan, or a file beside it is damaged.
    """
    kind = plan_kind(folder)
    if kind == "train":
        plan = read_plan(folder)
        _check(folder, plan)
        evidence = TrainEvidence(
            verified=read_verified(folder),
            trials=read_trials(folder / TRIALS_NAME),
            files=read_launch_files(folder, plan.files),
            what_if=_curves(what_if, kind="train"),
        )
        return train_report(plan, evidence)
    if kind == "serve":
        deployment = read_plan_as(folder, ServePlan)
        return serve_report(
            deployment,
            ServeEvidence(
                files=read_launch_files(folder, deployment.files),
                replay=replay,
                what_if=_curves(what_if, kind="serve"),
                verified=read_verified_as(ServeVerified, folder),
            ),
        )
    if kind == "place":
        placement = read_place_plan(folder)
        slots = max(placement.decision.slots_per_rank) if placement.decision else None
        return place_report(
            placement,
            PlaceEvidence(
                maps=read_heat_maps(folder, placement.files),
                files=read_launch_files(folder, placement.files),
                verified=read_verified_as(PlaceVerified, folder),
                what_if=_curves(what_if, kind="place", slots=slots),
            ),
        )
    raise PlanUnreadableError(
        f"{folder}: a plan of kind {kind!r} has no report; known: train, serve, place"
    )


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


def _curves(
    what_if: WhatIfEvidence | None, *, kind: str, slots: int | None = None
) -> Section | None:
    if what_if is None:
        return None
    return what_if_section(what_if.result, what_if.changes, kind=kind, slots=slots)
