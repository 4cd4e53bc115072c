"""Verification as a function: what the command line calls and a notebook can call too.

Launches enter here, and trials and conclusions are written into the folder of the plan.
"""

import hashlib
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from profilers.machine import fingerprint
from profilers.records import Machine as MeasuredMachine
from profilers.records import Profile
from tuner.costs.kernel_table import KernelTable
from tuner.costs.residuals import Residual, residual_for
from tuner.costs.workload import Workload
from tuner.errors import PlanUnreadableError
from tuner.formulate.pricing import Machine
from tuner.output import write_files
from tuner.plan import Plan, VerifiedPlan
from tuner.plan_folder import (
    JOURNAL_NAME,
    PLAN_NAME,
    TRIALS_NAME,
    launch_files,
    read_plan,
    read_used_profile,
    write_trial,
    write_verified,
)
from tuner.spec.cluster import Pool
from tuner.verify.candidates import Candidates
from tuner.verify.command import CommandLauncher, parsed_template
from tuner.verify.launcher import Launch, Launcher, TrialLauncher, launch_locally, reference_trials
from tuner.verify.metrics import adapter_named
from tuner.verify.neighbourhood import Around, Neighbourhood
from tuner.verify.proposal import Proposal
from tuner.verify.records import TrialRecord, Verified, read_trials
from tuner.verify.slurm.launcher import Pace, SlurmLauncher
from tuner.verify.slurm.options import parsed_options
from tuner.verify.slurm.queue import check_programs
from tuner.verify.under_way import found_under_way, note
from tuner.verify.verification import REFERENCE as REFERENCE
from tuner.verify.verification import (
    Effort,
    Watcher,
    conclude,
    engine_of,
    run_trials,
    verified_plan,
)

UNDER_WAY_NAME = "under-way"
"""In the folder of trials: those that go on when this process ends."""


def verify(
    folder: Path,
    *,
    effort: Effort,
    resume: bool,
    watcher: Watcher,
    launch: Launcher = launch_locally,
    by: SlurmLauncher | CommandLauncher | None = None,
) -> Verified:
    """Launch the candidates of a plan, conclude, and refresh its launch files.

    Args:
        folder: of the plan; trials and conclusions are written into it, trial by trial.
        effort: how much to launch.
        resume: keep the trials that an earlier call finished; otherwise they are an error.
        watcher: told about every launch.
        launch: how the reference step is started.
        by: what runs trials instead: jobs of Slurm, or the user's own command.

    Raises:
        PlanUnreadableError: the plan or a trial record is damaged, or trials exist already.
        OutputError: the folder cannot be written.
        SchedulerError: Slurm refuses a trial or stays away.
    """
    made = read_plan(folder)
    _check_verifiable(made, folder, runs_engine=isinstance(by, CommandLauncher))
    finished = read_trials(folder / TRIALS_NAME)
    if finished and not resume:
        raise PlanUnreadableError(
            f"{folder} holds {len(finished)} trials already: add --resume to go on, or plan anew"
        )
    is_measured = bool(made.provenance.device_kind)
    profile = read_used_profile(folder) if is_measured else None
    around = around_plan(made, profile)
    trials: TrialLauncher = by or reference_trials(launch)
    with _trial_folders(folder, by=by, finished=finished, resume=resume) as (scratch, under_way):
        from tuner.verify.search import StudySearch

        study = StudySearch(
            around,
            journal=folder / TRIALS_NAME / JOURNAL_NAME,
            finished=finished,
            under_way=under_way,
        )

        def begin(trial: Path, proposal: Proposal) -> None:
            if isinstance(by, SlurmLauncher):
                note(trial, proposal, plan_sha256=_plan_sha256(folder))

        def write(record: TrialRecord) -> None:
            write_trial(folder, record)
            shutil.rmtree(scratch / f"{record.number:04d}", ignore_errors=True)

        records = run_trials(
            around,
            study,
            finished=finished,
            effort=effort,
            launch=trials,
            scratch=scratch,
            write=write,
            watcher=watcher,
            under_way=under_way,
            begin=begin,
            stop=by.stop if by is not None else lambda: None,
        )
    verified = conclude(
        made, records, prior=_prior(made, around), notes=_notes(profile, records, by=by)
    )
    emitted = launch_files(verified_plan(around, verified)) if verified.winner else None
    write_verified(folder, verified, launch=emitted)
    return verified


def slurm_trials(
    *,
    options: Iterable[str],
    requeue: bool,
    queue_s: float,
    told: Callable[[str], None],
) -> SlurmLauncher:
    """Return what runs trials as jobs of Slurm.

    Args:
        options: of sbatch, as `name=value`.
        requeue: start a job again after a node failed or it was preempted.
        queue_s: how long a trial may wait for its nodes.
        told: hears what becomes of jobs, a line each.

    Raises:
        SpecError: an option cannot be passed through.
        EnvironmentMissingError: Slurm is not installed here.
    """
    check_programs()
    return SlurmLauncher(
        options=parsed_options(options),
        requeue=requeue,
        pace=Pace(queue_s=queue_s),
        environment=os.environ,
        told=told,
    )


def command_trials(*, command: str, metrics: str) -> CommandLauncher:
    """Return what runs trials by the user's own command.

    Args:
        command: a template, see tuner/verify/command.py for its placeholders.
        metrics: how its steps are read, see tuner/verify/metrics.py.

    Raises:
        SpecError: the template or the way to read it is none.
    """
    return CommandLauncher(
        template=parsed_template(command),
        adapter=adapter_named(metrics),
        environment=os.environ,
        prepare=_write_launch_files,
    )


def around_plan(made: Plan, profile: Profile | None) -> Around:
    """Return what may be launched: around a plan that was measured, else what it names."""
    if profile is None:
        return Candidates(plan=made)
    return Neighbourhood(
        plan=made,
        work=work_of(made),
        machine=machine_of(made.cluster.pools[0], profile),
        limits=made.search,
    )


def _check_verifiable(made: Plan, folder: Path, *, runs_engine: bool) -> None:
    if made.decision is None:
        raise PlanUnreadableError(
            f"{folder}: the plan found nothing to launch ({made.binding_constraint})"
        )
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


@contextmanager
def _trial_folders(
    folder: Path,
    *,
    by: SlurmLauncher | CommandLauncher | None,
    finished: Sequence[TrialRecord],
    resume: bool,
) -> Iterator[tuple[Path, tuple[Proposal, ...]]]:
    """Say where trials have their folders, and which an earlier process left under way."""
    if not isinstance(by, SlurmLauncher):
        with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
            yield Path(scratch), ()
        return
    place = folder / TRIALS_NAME / UNDER_WAY_NAME
    if not resume and any(place.glob("[0-9]*")):
        raise PlanUnreadableError(
            f"{place} holds trials that may still run: add --resume to go on with them"
        )
    yield (
        place,
        found_under_way(
            place,
            by,
            plan_sha256=_plan_sha256(folder),
            finished=[record.number for record in finished],
        ),
    )


def _plan_sha256(folder: Path) -> str:
    return hashlib.sha256((folder / PLAN_NAME).read_bytes()).hexdigest()


def _write_launch_files(launch: Launch) -> None:
    """Write the files of every target for one trial."""
    trial = VerifiedPlan(
        plan=launch.plan,
        decision=launch.decision,
        predicted=launch.predicted,
        waived="this is a trial of the plan",
    )
    files = launch_files(trial)
    write_files(launch.folder, files.texts, executable=files.executable)


def _prior(made: Plan, around: Around) -> Residual:
    """Return the factors that the predictions hold already."""
    if isinstance(around, Neighbourhood):
        return around.machine.residual
    # The plan's own correction is in its predictions; trials correct those.
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
    if by is None:
        return _other_machine(measured)
    others = sorted({record.device for record in records if record.device} - {measured.device})
    return tuple(f"the profile is of {measured.device!r}, trials ran on {one!r}" for one in others)


def work_of(made: Plan) -> Workload:
    """Read off a plan what it trains."""
    return Workload(
        model=made.model,
        sequence_length=made.goal.sequence_length,
        global_batch_size=made.goal.global_batch_size,
        precision=made.goal.precision.value,
        load_ratio=made.load_ratio,
    )


def _other_machine(measured: MeasuredMachine) -> tuple[str, ...]:
    """Warn when trials run on another machine than the profile describes."""
    if importlib.util.find_spec("torch") is None:
        return ("this machine was not compared with the profile's: PyTorch is not installed here",)
    here = fingerprint(
        device_kind=measured.device_kind, world=measured.world, local_world=measured.world
    )
    found = here.differences(measured)
    if not found:
        return ()
    return (f"the profile describes another machine than this one: {'; '.join(found)}",)


def machine_of(pool: Pool, profile: Profile) -> Machine:
    """Say what a plan may use of a pool that was measured by a profile."""
    measured = profile.header.machine
    memory_bytes = pool.memory_per_device or measured.memory_bytes_per_device
    return Machine(
        num_devices=pool.num_devices,
        memory_limit_bytes=int(memory_bytes * pool.usable_memory_ratio),
        table=KernelTable.from_profile(profile),
        residual=residual_for(REFERENCE, device=measured.device, device_kind=measured.device_kind),
    )
