"""Verification of deployments as functions, for the command line and for notebooks.

The plan's choice and its alternatives are launched one after another by the user's command, each
measured by the user's benchmark client, until two fail for the same reason (identical_failures.py).
A plan is locked by one verification at a time; a guardian ends what a killed one leaves on this
machine (tuner/verify/leftovers.py).
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from profilers.files import read_bounded
from tuner.config.serve import ServeDecision
from tuner.engines.files import launch_files
from tuner.engines.serve_writers import emit_all_serving, unlaunchable
from tuner.errors import PlanUnreadableError, SpecError
from tuner.goals.serve_folder import (
    read_serve_plan,
    read_serve_trials,
    read_used_placement,
    write_serve_verified,
)
from tuner.goals.serve_trial import Reached, prepared_launch, write_launch_files
from tuner.goals.study_folder import opened_study
from tuner.paths import AnyPath, plan_folder
from tuner.plans.folder import MAX_PLAN_BYTES, PLAN_NAME, TRIALS_NAME
from tuner.plans.place import VerifiedPlacement
from tuner.plans.serve import ServePlan, ServePrediction, VerifiedServing
from tuner.units import format_s
from tuner.verify.command import parse_template
from tuner.verify.deployments.clients import find_client
from tuner.verify.deployments.conclusion import conclude
from tuner.verify.deployments.launcher import (
    CLIENT_PLACEHOLDERS,
    SERVER_PLACEHOLDERS,
    DeploymentLauncher,
)
from tuner.verify.deployments.records import (
    ServeTrial,
    ServeTrialRecord,
    ServeVerified,
)
from tuner.verify.deployments.space import PlannedDeployments, is_neighbour
from tuner.verify.identical_failures import stop_notes
from tuner.verify.leftovers import exclusive_use
from tuner.verify.loop import run_trials
from tuner.verify.records import Proposal

Neighbours = Callable[[AnyPath, ServePlan], Mapping[ServeDecision, ServePrediction]]


def verify_serve(
    folder: AnyPath,
    *,
    trials: int = 8,
    resume: bool,
    by: DeploymentLauncher,
    reached: Reached | None = None,
    neighbours: Neighbours = lambda _folder, _plan: {},
) -> ServeVerified:
    """Launch the deployments that a plan names, conclude, and refresh its launch files.

    Args:
        folder: of the plan; records and conclusions are written into it, launch by launch.
        trials: most decisions to launch.
        resume: keep the launches of an earlier call; otherwise they are an error.
        by: starts and measures deployments, see `deployment_trials`.
        neighbours: prices what else may be launched, see `serve_planned.neighbours`; none: only
            what the plan names.
        reached: their addresses; None: those of the emitted script for this machine.

    Raises:
        PlanUnreadableError: the plan or a record is damaged, or trials exist already.
        SpecError: the address of the deployments is unknown, or a template lacks a value.
        EnvironmentMissingError: a program does not exist, or a port is taken.
        OutputError: the folder cannot be written, or another verification has it.
        StudyError: the study cannot be locked.
    """
    from tuner.verify.study.shared import TrialKind

    folder = plan_folder(folder)
    plan = read_serve_plan(folder)
    if plan.decision is None or plan.predicted is None:
        raise PlanUnreadableError(
            f"{folder}: the plan has nothing to launch ({plan.binding_constraint})"
        )
    placement = read_used_placement(folder)
    space = PlannedDeployments(plan=plan, neighbours=_launchable(neighbours, folder, plan, by))
    with (
        exclusive_use(folder / TRIALS_NAME, plan=folder) as scratch,
        opened_study(
            folder,
            space,
            kind=TrialKind(proposal=Proposal[ServeDecision], record=ServeTrialRecord),
            sha256=_sha256(folder),
            scratch=scratch,
            resume=resume,
            storage="",
            on_message=by.on_message,
        ) as study,
    ):
        for one in study.records:
            space.predicted(one.decision)

        def start(
            proposal: Proposal[ServeDecision], _records: Sequence[ServeTrialRecord]
        ) -> Callable[[], ServeTrialRecord]:
            number, decision = proposal.number, proposal.decision
            predicted, address = space.predicted(decision), reached or Reached()
            launch = prepared_launch(plan, decision, predicted, number, scratch, address)
            by.on_message(f"trial {number}: {space.describe(decision)}")
            return lambda: by(launch, origin=proposal.origin)

        def report(record: ServeTrialRecord) -> None:
            if record.status != "ok":
                by.on_message(f"{record.status}: {record.reason}")

        records = run_trials(study, start=start, trials=trials, ended=report)
        wanted = min(trials, len(space.predictions))
        verified = conclude(plan, records)
        notes = (*verified.notes, *stop_notes(records, earlier=study.earlier, trials=wanted))
        verified = verified.model_copy(update={"notes": notes})
        _write(folder, plan, verified, space.predictions, placement)
    return verified


def _launchable(
    neighbours: Neighbours, folder: Path, plan: ServePlan, by: DeploymentLauncher
) -> Mapping[ServeDecision, ServePrediction]:
    """Return the neighbours of the plan's choice: those launched before, those launchable now."""
    known = {
        one.decision: one.predicted
        for one in read_serve_trials(folder)
        if plan.decision is not None and is_neighbour(one.decision, plan.decision)
    }
    try:
        priced = neighbours(folder, plan)
    except (PlanUnreadableError, SpecError) as error:
        by.on_message(f"only what the plan names is launched: {error}")
        return known
    return known | {
        decision: predicted
        for decision, predicted in priced.items()
        if not unlaunchable(VerifiedServing(plan=plan, decision=decision, predicted=predicted))
    }


def _sha256(folder: Path) -> str:
    """Return the hash of a plan without its list of files, which a verification changes."""
    content = json.loads(read_bounded(folder / PLAN_NAME, most_bytes=MAX_PLAN_BYTES))
    content.pop("files", None)
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


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
        start_s=start_s,
        watch_s=watch_s,
        environment=environment,
        prepare=lambda launch: write_launch_files(launch, placement),
        on_message=on_message,
    )


def _write(
    folder: Path,
    plan: ServePlan,
    verified: ServeVerified,
    predicted: Mapping[ServeDecision, ServePrediction],
    placement: VerifiedPlacement | None,
) -> None:
    """Write the conclusion, and the launch files of the winner in place of any other's."""
    winner = verified.winner
    if winner is None:
        write_serve_verified(folder, verified, plan=plan, launch=None)
        return
    won = next(one for one in verified.trials if one.decision == winner)
    chosen = VerifiedServing(
        plan=plan, decision=winner, predicted=predicted[winner], measured=_measured(won)
    )
    files = launch_files(emit_all_serving(chosen, placement=placement))
    write_serve_verified(folder, verified, plan=plan, launch=files)


def _measured(won: ServeTrial) -> str:
    """Format the measurements of the winner."""
    if won.measured_ttft_s is None or won.measured_tpot_s is None:
        raise ValueError("the winner was not measured")
    rate = won.measured_requests_per_s
    return (
        f"TTFT mean {format_s(won.measured_ttft_s)}, TPOT mean {format_s(won.measured_tpot_s)},"
        f" {0.0 if rate is None else rate:.4g} requests/s, medians of {won.runs} runs."
    )
