"""Verification of plans as functions, for the command line and for notebooks.

Launchers enter here, and trials and conclusions are written into the folder of the plan. One recipe
serves both goals: end what a killed verification left (tuner/verify/termination.py), join the study
of the plan, run the loop over its trials (tuner/verify/loop.py), conclude from all records, and
refresh the launch files for the winner.

    training     several processes may verify one plan; jobs may be smaller than the planned one
    deployments  launched one after another by the user's command, each measured by the user's
                 benchmark client; one verification at a time has their ports
"""

import hashlib
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from profilers.files import read_bounded
from profilers.machine import fingerprint
from profilers.records import Profile
from tuner.config.serve import ServeDecision
from tuner.costs.residuals import Residual, residual_for
from tuner.engines.checkpoints import keeps_checkpoints
from tuner.engines.files import launch_files
from tuner.engines.serve_writers import emit_all_serving, unlaunchable
from tuner.engines.writers import broken_rules, emit_all, emitted_targets
from tuner.errors import PlanUnreadableError, SpecError
from tuner.goals.profiles import machine_of
from tuner.goals.serve_folder import (
    read_serve_plan,
    read_serve_trials,
    read_used_placement,
    write_serve_verified,
)
from tuner.goals.serve_trial import Reached, prepared_launch, write_launch_files
from tuner.goals.study_folder import opened_study, plan_sha256
from tuner.goals.train_folder import read_plan, read_used_profile, write_verified
from tuner.output import write_files
from tuner.paths import AnyPath, plan_folder
from tuner.plans.folder import FEWER_NODES, MAX_PLAN_BYTES, PLAN_NAME, TRIALS_NAME
from tuner.plans.place import VerifiedPlacement
from tuner.plans.serve import ServePlan, ServePrediction, VerifiedServing
from tuner.plans.train import Plan, VerifiedPlan
from tuner.units import format_s
from tuner.verify.budget.budget import Budget, Spending
from tuner.verify.budget.prices import build_pricer
from tuner.verify.command import CommandLauncher, find_adapter, parse_template
from tuner.verify.deployments.clients import find_client
from tuner.verify.deployments.conclusion import conclude as conclude_serving
from tuner.verify.deployments.launcher import (
    CLIENT_PLACEHOLDERS,
    SERVER_PLACEHOLDERS,
    DeploymentLauncher,
)
from tuner.verify.deployments.records import ServeTrial, ServeTrialRecord, ServeVerified
from tuner.verify.deployments.space import PlannedDeployments, is_neighbour
from tuner.verify.launcher import Launch, TrialLauncher, launch_locally
from tuner.verify.launches import TrialJobs, engine_of, start_training, total_steps
from tuner.verify.loop import run_trials, stop_notes
from tuner.verify.records import Proposal, TrialRecord, Verified, read_trials
from tuner.verify.slurm import SlurmLauncher, check_programs, parse_options
from tuner.verify.space import TrainSpace
from tuner.verify.termination import exclusive_use, scratch_folder
from tuner.verify.verification import Effort, Watcher, conclude, verified_plan

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
        verified = conclude_serving(plan, records)
        notes = (*verified.notes, *stop_notes(records, earlier=study.earlier, trials=wanted))
        verified = verified.model_copy(update={"notes": notes})
        _write(folder, plan, verified, space.predictions, placement)
    return verified


def _launchable(
    neighbours: Neighbours, folder: Path, plan: ServePlan, by: DeploymentLauncher
) -> Mapping[ServeDecision, ServePrediction]:
    """Return the neighbours of the plan's choice: those launched before, those launchable now."""
    known = {
        trial.decision: trial.predicted
        for trial in read_serve_trials(folder)
        if plan.decision is not None and is_neighbour(trial.decision, plan.decision)
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
    won = next(trial for trial in verified.trials if trial.decision == winner)
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


def verify(
    folder: AnyPath,
    *,
    effort: Effort,
    resume: bool,
    watcher: Watcher,
    launch: TrialLauncher = launch_locally,
    by: SlurmLauncher | CommandLauncher | None = None,
    storage: str = "",
    on_message: Callable[[str], None] = lambda _line: None,
    budget: Budget | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Verified:
    """Launch the candidates of a plan, conclude, and refresh its launch files.

    Several processes may do so in parallel, also on several nodes: they share a study, no decision
    is launched twice, `effort` counts the trials of all, and each waits for the last trial and
    concludes from all.

    Args:
        folder: of the plan; trials and conclusions are written into it, trial by trial.
        effort: how much to launch.
        resume: keep the trials of earlier calls; otherwise they are an error, unless `storage`
            names their study.
        watcher: called for every launch.
        launch: starts the reference step.
        by: runs trials instead: Slurm jobs, or the user's own command.
        storage: URL of a PostgreSQL database that holds the study; empty: a file in the folder.
        on_message: gets a line when this call waits for other processes or loses a trial to one.
        budget: of this call's trials; then scaled-down jobs may replace full-scale ones.
        clock: of the budget.

    Raises:
        SpecError: the budget is too small for any trial.
        PlanUnreadableError: the plan or a trial record is damaged, or trials exist already.
        OutputError: the folder cannot be written.
        SchedulerError: Slurm refuses a trial or does not respond.
        StudyError: the study cannot be reached or locked.
    """
    from tuner.verify.study.shared import TRAINING

    folder = plan_folder(folder)
    made = read_plan(folder)
    _check_verifiable(made, folder, runs_engine=isinstance(by, CommandLauncher))
    is_measured = bool(made.provenance.device_kind)
    profile = read_used_profile(folder) if is_measured else None
    space = decision_space(made, profile)
    jobs = TrialJobs(
        space=space,
        price=build_pricer(space, used=folder / "used"),
        max_devices=budget.max_devices if budget else None,
    )
    spending = Spending(
        jobs=jobs,
        budget=budget or Budget(),
        clock=clock,
        num_steps=total_steps(effort.steps),
        runs_reference=not isinstance(by, CommandLauncher),
    )
    if budget is not None and not read_trials(folder / TRIALS_NAME):
        spending.check()
    for line in spending.without_own_choice():
        on_message(line)
    trials_folder = folder / TRIALS_NAME
    # Nodes of a job see the plan's folder.
    inside = trials_folder if isinstance(by, SlurmLauncher) else None
    with (
        scratch_folder(trials_folder, inside=inside, on_message=on_message) as scratch,
        opened_study(
            folder,
            space,
            kind=TRAINING,
            sha256=plan_sha256(folder),
            scratch=scratch,
            resume=resume,
            storage=storage,
            on_message=on_message,
        ) as study,
    ):
        records = run_trials(
            study,
            start=partial(
                start_training,
                jobs=jobs,
                steps=effort.steps,
                launch=by or launch,
                scratch=scratch,
                started=watcher.started,
                latest_s=spending.latest_s,
            ),
            affordable=lambda seen: spending.affordable(seen.records, running=seen.open),
            trials=effort.trials,
            ended=watcher.ended,
            parallel=effort.parallel,
            stop=by.stop if by is not None else lambda: None,
        )
        stopped = stop_notes(records, earlier=study.earlier, trials=effort.trials)
        # After identical failures the budget is not the reason that trials were not started.
        stopped = stopped or spending.stop_notes(records, trials=effort.trials)
        notes = _notes(profile, records, by=by)
        verified = conclude(
            made,
            records,
            prior=_prior(made, space),
            notes=(*notes, *stopped),
            space=space,
        )
        emitted = None
        if verified.winner:
            chosen = verified_plan(space, verified)
            emitted = launch_files(emit_all(chosen))
            if (folder / FEWER_NODES).is_dir() and not keeps_checkpoints(chosen):
                # It would be started from checkpoints that it cannot restore.
                shutil.rmtree(folder / FEWER_NODES)
                removed = f"{FEWER_NODES}/ does not restore the winner's checkpoints: removed"
                verified = verified.model_copy(update={"notes": (*verified.notes, removed)})
        write_verified(folder, verified, launch=emitted)
    return verified


def slurm_trials(
    *,
    options: Iterable[str],
    requeue: bool,
    queue_s: float,
    on_message: Callable[[str], None],
) -> SlurmLauncher:
    """Return a launcher that runs trials as Slurm jobs.

    Args:
        options: of sbatch, as `name=value`.
        requeue: requeue a job after a node failure or preemption.
        queue_s: how long a trial may wait in the queue.
        on_message: gets a line when a job is submitted and when it starts.

    Raises:
        SpecError: an option cannot be passed through.
        EnvironmentMissingError: Slurm is not installed here.
    """
    check_programs()
    return SlurmLauncher(
        options=parse_options(options),
        requeue=requeue,
        queue_s=queue_s,
        environment=os.environ,
        on_message=on_message,
    )


def command_trials(*, command: str, metrics: str) -> CommandLauncher:
    """Return a launcher that runs trials by the user's own command.

    Args:
        command: a template, see tuner/verify/command.py for its placeholders.
        metrics: how its steps are read, see tuner/verify/command.py.

    Raises:
        SpecError: the template or the metrics parser is invalid.
    """
    return CommandLauncher(
        template=parse_template(command),
        adapter=find_adapter(metrics),
        environment=os.environ,
        prepare=_write_launch_files,
    )


def decision_space(made: Plan, profile: Profile | None) -> TrainSpace:
    """Return the launchable decisions: a measured plan's neighbourhood, or those that it names."""
    if profile is None:
        return TrainSpace(plan=made)
    machine = machine_of(made.cluster.pools[0], profile, residual=made.provenance.residual)
    return TrainSpace(plan=made, machine=machine)


def _check_verifiable(made: Plan, folder: Path, *, runs_engine: bool) -> None:
    if made.decision is None:
        raise PlanUnreadableError(
            f"{folder}: the plan has nothing to launch ({made.binding_constraint})"
        )
    _check_launchable(made, folder)
    if runs_engine:
        return
    if not made.provenance.profile_sha256:
        raise PlanUnreadableError(
            f"{folder}: the plan rests on datasheets, so no trial of the reference step can be"
            " compared with it; measure the machine with `moetune profile` and plan with --profile,"
            " or launch its engine with --launcher command"
        )
    if not made.provenance.device_kind:
        raise PlanUnreadableError(
            f"{folder}: the plan is of {made.emit[0]} and trials run the reference engine; launch "
            "its engine with --launcher command, or emit 'reference' from a profile of `moetune "
            "profile`"
        )


def _check_launchable(made: Plan, folder: Path) -> None:
    """Refuse an edited plan.json with decisions that its own targets cannot launch."""
    decisions = [runner_up.decision for runner_up in made.runners_up]
    for decision in (*filter(None, (made.decision,)), *decisions):
        for target in emitted_targets(made):
            if broken := broken_rules(target, made, decision):
                raise PlanUnreadableError(
                    f"{folder / PLAN_NAME}: a decision cannot be launched: {broken[0]}; write the"
                    " plan anew"
                )


def _write_launch_files(launch: Launch) -> None:
    """Write the files of every target for one trial."""
    trial = VerifiedPlan(
        plan=launch.plan,
        decision=launch.decision,
        predicted=launch.predicted,
        waived="this is a trial of the plan",
    )
    files = launch_files(emit_all(trial))
    write_files(launch.folder, files.contents, executable=files.executable)


def _prior(made: Plan, space: TrainSpace) -> Residual:
    """Return the residual that the predictions include already."""
    if space.machine is not None:
        return space.machine.residual
    # The predictions include the plan's own residual; trials correct them.
    return residual_for(engine_of(made), device="", device_kind="cuda")


def _notes(
    profile: Profile | None,
    records: Sequence[TrialRecord],
    *,
    by: SlurmLauncher | CommandLauncher | None,
) -> tuple[str, ...]:
    if profile is None or isinstance(by, CommandLauncher):
        return ()
    measured = profile.header.machine
    if by is None and importlib.util.find_spec("torch") is not None:
        here = fingerprint(
            device_kind=measured.device_kind, world=measured.world, local_world=measured.world
        )
        differences = here.differences(measured)
        line = f"the profile describes another machine than this one: {'; '.join(differences)}"
        return (line,) if differences else ()
    others = sorted({record.device for record in records if record.device} - {measured.device})
    return tuple(
        f"the profile is of {measured.device!r}, trials ran on {device!r}" for device in others
    )
