"""Verification of deployments as functions, for the command line and for notebooks.

The plan's choice and its alternatives are launched one after another by the user's command, each
measured by the user's benchmark client, until two fail for the same reason (identical_failures.py).
A plan is locked by one verification at a time; a guardian ends what a killed one leaves on this
machine (tuner/verify/leftovers.py).
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tuner.config.serve import ServeDecision
from tuner.engines.files import LaunchFiles, launch_files
from tuner.engines.serve_writers import emit_all_serving, unlaunchable
from tuner.errors import PlanUnreadableError, UnsuitedPlacementError
from tuner.goals.serve_folder import (
    read_serve_plan,
    read_serve_trials,
    read_used_placement,
    write_serve_verified,
)
from tuner.goals.serve_trial import Reached, prepared_launch, write_launch_files
from tuner.paths import AnyPath, plan_folder
from tuner.plans.folder import TRIALS_NAME, write_trial
from tuner.plans.place import VerifiedPlacement
from tuner.plans.serve import ServePlan, ServePrediction, VerifiedServing
from tuner.units import format_s
from tuner.verify.command import parse_template
from tuner.verify.deployments.clients import find_client
from tuner.verify.deployments.conclusion import conclude, contenders
from tuner.verify.deployments.exclusive_use import exclusive_use
from tuner.verify.deployments.launcher import (
    CLIENT_PLACEHOLDERS,
    SERVER_PLACEHOLDERS,
    DeploymentLaunch,
    DeploymentLauncher,
    DeploymentResult,
    DeploymentTimeouts,
)
from tuner.verify.deployments.records import (
    ServeOrigin,
    ServeTrial,
    ServeTrialRecord,
    ServeVerified,
)
from tuner.verify.identical_failures import FailureWatch
from tuner.verify.kept_logs import kept_log


@dataclass(frozen=True, slots=True, kw_only=True)
class DeploymentEffort:
    """How much to launch."""

    trials: int = 8
    """Most decisions to launch."""
    repeats: int = 0
    """Most repeats while the two best are a tie within noise."""


def verify_serve(
    folder: AnyPath,
    *,
    effort: DeploymentEffort,
    resume: bool,
    by: DeploymentLauncher,
    reached: Reached | None = None,
) -> ServeVerified:
    """Launch the deployments that a plan names, conclude, and refresh its launch files.

    Args:
        folder: of the plan; records and conclusions are written into it, launch by launch.
        effort: how much to launch.
        resume: keep the launches of an earlier call; otherwise they are an error.
        by: starts and measures deployments, see `deployment_trials`.
        reached: their addresses; None: those of the emitted script for this machine.

    Raises:
        PlanUnreadableError: the plan or a record is damaged, or trials exist already.
        SpecError: the address of the deployments is unknown, or a template lacks a value.
        EnvironmentMissingError: a program does not exist, or a port is taken.
        OutputError: the folder cannot be written, or another verification has it.
    """
    folder = plan_folder(folder)
    plan = read_serve_plan(folder)
    if plan.decision is None or plan.predicted is None:
        raise PlanUnreadableError(
            f"{folder}: the plan has nothing to launch ({plan.binding_constraint})"
        )
    placement = read_used_placement(folder)
    with exclusive_use(folder / TRIALS_NAME, plan=folder) as scratch:
        study = _Study(
            folder=folder,
            plan=plan,
            candidates=_candidates(plan),
            scratch=scratch,
            by=by,
            reached=reached or Reached(),
            records=list(read_serve_trials(folder)),
        )
        study.check(resume=resume)
        stopped = study.run(effort)
        verified = conclude(plan, study.records)
        verified = verified.model_copy(update={"notes": (*verified.notes, *stopped)})
        _write(folder, plan, verified, study.candidates, placement)
    return verified


def _candidates(plan: ServePlan) -> dict[ServeDecision, ServePrediction]:
    """Return the decisions that the plan names, its choice first, with their predictions."""
    predictions: dict[ServeDecision, ServePrediction] = {}
    if plan.decision is not None and plan.predicted is not None:
        predictions[plan.decision] = plan.predicted
    for other in plan.alternatives:
        predictions.setdefault(other.decision, other.predicted)
    return predictions


@dataclass(frozen=True, slots=True, kw_only=True)
class _Study:
    """Launches of one plan; `records` grows with each."""

    folder: Path
    plan: ServePlan
    candidates: Mapping[ServeDecision, ServePrediction]
    scratch: Path
    by: DeploymentLauncher
    reached: Reached
    records: list[ServeTrialRecord]

    def check(self, *, resume: bool) -> None:
        """Refuse records without `resume`, or of another plan."""
        if self.records and not resume:
            raise PlanUnreadableError(
                f"{self.folder} holds {len(self.records)} trials already: add --resume to continue,"
                " or plan anew"
            )
        for one in self.records:
            if one.decision not in self.candidates:
                raise PlanUnreadableError(
                    f"{self.folder / TRIALS_NAME}: trial {one.number} is of no decision that the"
                    " plan names; delete it, or plan anew"
                )

    def run(self, effort: DeploymentEffort) -> tuple[str, ...]:
        """Launch the rest until two fail for the same reason; return why it stopped, if so."""
        failures = FailureWatch()
        earlier = list(self.records)
        failures.is_over(earlier)
        wanted = list(self.candidates)[: effort.trials]
        done = {one.decision for one in earlier}
        for decision in dict.fromkeys(one.decision for one in failures.to_repeat(earlier)):
            if not failures.is_over(self.records):
                self.launch(decision, "repeat")
        for decision in wanted:
            if decision not in done and not failures.is_over(self.records):
                self.launch(decision, "plan" if decision == self.plan.decision else "alternative")
        left = effort.repeats - sum(map(self._is_of_noise, self.records))
        while left > 0 and not failures.is_over(self.records):
            retries = contenders(self.plan, self.records)
            if not retries:
                break
            for decision in retries[:left]:
                if not failures.is_over(self.records):
                    self.launch(decision, "repeat")
            left -= len(retries)
        return failures.stop_notes(self.records, trials=len(wanted))

    def _is_of_noise(self, one: ServeTrialRecord) -> bool:
        """Whether a launch repeats a successful one, not a failed one."""
        return one.origin == "repeat" and any(
            other.decision == one.decision and other.status == "ok" and other.number < one.number
            for other in self.records
        )

    def launch(self, decision: ServeDecision, origin: ServeOrigin) -> None:
        """Launch a decision and keep the record."""
        number = max((one.number for one in self.records), default=-1) + 1
        prepared = prepared_launch(
            self.plan, decision, self.candidates[decision], number, self.scratch, self.reached
        )
        self.by.on_message(f"trial {number}: {_title(decision)}")
        record = _launched(prepared, origin=origin, by=self.by)
        log = "" if record.status == "ok" else kept_log(prepared.folder)
        write_trial(self.folder, record, log=log)
        self.records.append(record)
        shutil.rmtree(prepared.folder, ignore_errors=True)


def deployment_trials(
    *,
    folder: AnyPath,
    command: str,
    benchmark: str,
    metrics: str,
    runs: int,
    start_s: float,
    on_message: Callable[[str], None],
    environment: Mapping[str, str] = os.environ,
    watch_s: float = 1.0,
) -> DeploymentLauncher:
    """Return what starts deployments by the user's command and measures them by a client.

    Args:
        folder: of the plan.
        command: a template, see tuner/verify/deployments/launcher.py for its placeholders.
        benchmark: template of the benchmark client; empty for the emitted one.
        metrics: the client, see tuner/verify/deployments/clients.py.
        runs: benchmark runs per deployment.
        start_s: longest start-up of a deployment.
        on_message: gets progress messages, a line each.
        environment: of both commands.
        watch_s: polling interval of a starting deployment.

    Raises:
        SpecError: a template or the client is invalid.
    """
    folder = Path(folder)
    client = find_client(metrics)
    placement = read_used_placement(folder)
    return DeploymentLauncher(
        command=parse_template(
            command, placeholders=SERVER_PLACEHOLDERS, example="bash {launch}/local.sh"
        ),
        benchmark=parse_template(
            benchmark or client.command,
            option="--bench",
            placeholders=CLIENT_PLACEHOLDERS,
            example="python -m sglang.bench_serving --base-url {url} --output-file {result} ...",
        ),
        client=client,
        runs=runs,
        pace=DeploymentTimeouts(start_s=start_s, watch_s=watch_s),
        environment=environment,
        prepare=lambda launch: write_launch_files(launch, placement),
        on_message=on_message,
    )


def _launched(
    launch: DeploymentLaunch, *, origin: ServeOrigin, by: DeploymentLauncher
) -> ServeTrialRecord:
    broken = unlaunchable(
        VerifiedServing(plan=launch.plan, decision=launch.decision, predicted=launch.predicted)
    )
    try:
        result = by(launch) if not broken else _unlaunched("; ".join(broken))
    except UnsuitedPlacementError as error:
        result = _unlaunched(str(error))
    if result.status != "ok":
        by.on_message(f"{result.status}: {result.reason}")
    return ServeTrialRecord(
        number=launch.number,
        origin=origin,
        decision=launch.decision,
        status=result.status,
        reason=result.reason,
        last_lines=result.last_lines,
        predicted=launch.predicted,
        runs=result.runs,
        ready_s=result.ready_s,
        wall_s=result.wall_s,
        engine=launch.plan.goal.engine_on(launch.decision.instances[0].pool).name,
        client=by.client.name,
    )


def _unlaunched(reason: str) -> DeploymentResult:
    """A decision that the launch files cannot express fails only its own trial."""
    return DeploymentResult(status="crashed", reason=reason[:300], wall_s=0.0)


def _write(
    folder: Path,
    plan: ServePlan,
    verified: ServeVerified,
    candidates: Mapping[ServeDecision, ServePrediction],
    placement: VerifiedPlacement | None,
) -> None:
    """Write the conclusion, and the launch files of the winner in place of any other's."""
    if verified.winner is None:
        write_serve_verified(folder, verified, plan=plan, launch=None)
        return
    won = next(one for one in verified.trials if one.decision == verified.winner)
    emitted = {
        decision: files
        for decision, predicted in candidates.items()
        if (
            files := _files(
                VerifiedServing(
                    plan=plan,
                    decision=decision,
                    predicted=predicted,
                    measured=_measured(won) if decision == verified.winner else "",
                ),
                placement,
            )
        )
    }
    stale = {name for files in emitted.values() for name in files.contents}
    write_serve_verified(folder, verified, plan=plan, launch=emitted[verified.winner], stale=stale)


def _files(verified: VerifiedServing, placement: VerifiedPlacement | None) -> LaunchFiles | None:
    if unlaunchable(verified):
        return None
    with contextlib.suppress(UnsuitedPlacementError):
        return launch_files(emit_all_serving(verified, placement=placement))
    return None


def _measured(won: ServeTrial) -> str:
    """Format the measurements of the winner."""
    if won.measured_ttft_s is None or won.measured_tpot_s is None:
        raise ValueError("the winner was not measured")
    rate = won.measured_requests_per_s
    return (
        f"TTFT mean {format_s(won.measured_ttft_s)}, TPOT mean {format_s(won.measured_tpot_s)},"
        f" {0.0 if rate is None else rate:.4g} requests/s, medians of {won.runs} runs."
    )


def _title(decision: ServeDecision) -> str:
    groups = ", ".join(
        f"{group.count} x {group.devices} {group.role.value} on {group.pool}"
        for group in decision.instances
    )
    return f"{decision.num_devices} devices, {decision.mode}: {groups}"
