"""Verification as a function: what the command line calls and a notebook can call too.

Launches enter here, and trials and conclusions are written into the folder of the plan.
"""

import importlib.util
import tempfile
from pathlib import Path
from typing import Final

from profilers.machine import fingerprint
from profilers.records import Machine as MeasuredMachine
from profilers.records import Profile
from tuner.costs.kernel_table import KernelTable
from tuner.costs.residuals import residual_for
from tuner.costs.workload import Workload
from tuner.errors import PlanUnreadableError
from tuner.formulate.pricing import Machine
from tuner.plan import Plan
from tuner.plan_folder import (
    JOURNAL_NAME,
    TRIALS_NAME,
    launch_files,
    read_plan,
    read_used_profile,
    write_trial,
    write_verified,
)
from tuner.spec.cluster import Pool
from tuner.verify.launcher import Launcher, launch_locally
from tuner.verify.neighbourhood import Neighbourhood
from tuner.verify.records import Verified, read_trials
from tuner.verify.verification import Effort, Watcher, conclude, run_trials, verified_plan

REFERENCE: Final = "reference"
"""The engine whose operations the cost model lists."""


def verify(
    folder: Path,
    *,
    effort: Effort,
    resume: bool,
    watcher: Watcher,
    launch: Launcher = launch_locally,
) -> Verified:
    """Launch the candidates of a plan, conclude, and refresh its launch files.

    Args:
        folder: of the plan; trials and conclusions are written into it, trial by trial.
        effort: how much to launch.
        resume: keep the trials that an earlier call finished; otherwise they are an error.
        watcher: told about every launch.
        launch: how a trial is started.

    Raises:
        PlanUnreadableError: the plan or a trial record is damaged, or trials exist already.
        OutputError: the folder cannot be written.
    """
    made = read_plan(folder)
    if made.decision is None:
        raise PlanUnreadableError(
            f"{folder}: the plan found nothing to launch ({made.binding_constraint})"
        )
    if not made.provenance.profile_sha256:
        raise PlanUnreadableError(
            f"{folder}: the plan rests on datasheets, so no trial can be compared with it; measure "
            "the machine with `moetune profile` and plan with --profile, or launch its files as "
            "they are"
        )
    if not made.provenance.device_kind:
        raise PlanUnreadableError(
            f"{folder}: the plan is of {made.emit[0]} and trials run the reference engine; launch "
            "its files as they are, or emit 'reference' from a profile of `moetune profile`"
        )
    finished = read_trials(folder / TRIALS_NAME)
    if finished and not resume:
        raise PlanUnreadableError(
            f"{folder} holds {len(finished)} trials already: add --resume to go on, or plan anew"
        )
    profile = read_used_profile(folder)
    machine = machine_of(made.cluster.pools[0], profile)
    neighbourhood = Neighbourhood(
        plan=made, work=work_of(made), machine=machine, limits=made.search
    )
    from tuner.verify.search import StudySearch

    study = StudySearch(
        neighbourhood, journal=folder / TRIALS_NAME / JOURNAL_NAME, finished=finished
    )
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        records = run_trials(
            neighbourhood,
            study,
            finished=finished,
            effort=effort,
            launch=launch,
            scratch=Path(scratch),
            write=lambda record: write_trial(folder, record),
            watcher=watcher,
        )
    verified = conclude(
        made, records, prior=machine.residual, notes=_other_machine(profile.header.machine)
    )
    emitted = launch_files(verified_plan(neighbourhood, verified)) if verified.winner else None
    write_verified(folder, verified, launch=emitted)
    return verified


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
