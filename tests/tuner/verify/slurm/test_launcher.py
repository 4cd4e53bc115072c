"""One trial against programs that answer as Slurm would, from files of the test."""

import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from profilers.steps.config import StepReport
from tests.rows import each_row
from tuner.errors import SchedulerError
from tuner.goals.train_folder import read_plan
from tuner.verify.launcher import LOG_NAME, PROGRESS_NAME, REPORT_NAME, Launch
from tuner.verify.slurm.launcher import SlurmLauncher, SlurmTimeouts
from tuner.verify.slurm.outcome import TICKET_NAME, WITHDRAWN_NAME
from tuner.verify.slurm.script import (
    ABANDONED_EXIT,
    EXIT_NAME,
    JOB_NAME,
    LEASE_NAME,
    LOST_NODE_EXIT,
    NODE_NAME,
)

REPORT = StepReport(
    device="node-1",
    libraries={},
    step_s=(1.0,),
    losses=(),
    tokens_per_step=1,
    memory=(),
    loads=(),
    chunks_used=(),
)

FAKE = """
import os, pathlib, sys
lab = pathlib.Path({lab!r})
name, *words = pathlib.Path(sys.argv[0]).name, *sys.argv[1:]
with (lab / "asked").open("a") as asked:
    asked.write(" ".join([name, *words]) + "\\n")
def states():
    lines = (lab / "states").read_text().splitlines()
    if len(lines) > 1:
        (lab / "states").write_text("\\n".join(lines[1:]))
    return lines[0]
if (lab / "away").exists():
    sys.exit("Unable to contact slurm controller (connect failure)")
if name == "sbatch":
    (lab / "variables").write_text(" ".join(os.environ))
    (lab / "name").write_text(next(
        line.split("=")[1] for line in open(words[-1]) if line.startswith("#SBATCH --job-name=")
    ).strip())
    print("41")
elif name == "squeue":
    known = lab / "name"
    if known.exists() and known.read_text().strip() in " ".join(words):
        print("41")
elif name == "scancel":
    (lab / "states").write_text("CANCELLED")
elif name == "scontrol":
    state = states()
    if state == "UNKNOWN":
        sys.exit("slurm_load_jobs error: Invalid job id specified")
    told, *rest = state.split()
    if told.startswith("run:"):
        exec(told[4:].replace("~", " "))
        told = "COMPLETED"
    job = (lab / "name").read_text().strip() if (lab / "name").exists() else "moetune-1"
    print("JobId=41 JobName=" + job, "JobState=" + told, *rest, "Reason=Resources")
else:
    sys.exit(1)
"""

QUICK = SlurmTimeouts(poll_s=0.01, lease_s=60.0, patience_s=0.5, queue_s=5.0, settle_s=0.1)


class Lab:
    """A Slurm that says what a test wants."""

    def __init__(self, folder: Path, launch: Launch) -> None:
        self.folder = folder
        self.trial = launch.folder
        self.launch = launch
        self.messages: list[str] = []

    def forget(self) -> None:
        """Forget what was asked and left."""
        shutil.rmtree(self.trial, ignore_errors=True)
        for name in ("asked", "name"):
            (self.folder / name).unlink(missing_ok=True)
        self.messages.clear()

    def says(self, *states: str) -> None:
        (self.folder / "states").write_text("\n".join(states))

    def leaves(self, code: int, report: str = "") -> None:
        """What a run has left in the folder of its trial."""
        self.trial.mkdir(parents=True, exist_ok=True)
        (self.trial / EXIT_NAME).write_text(f"{code}\n")
        if report:
            (self.trial / REPORT_NAME).write_text(report)

    def calls(self, program: str) -> list[str]:
        lines = (self.folder / "asked").read_text().splitlines()
        return [line for line in lines if line.split()[0] == program]

    def launcher(self, pace: SlurmTimeouts = QUICK) -> SlurmLauncher:
        return SlurmLauncher(pace=pace, environment=os.environ, on_message=self.messages.append)


@pytest.fixture
def lab(planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A folder of programs, and a trial to launch."""
    folder = tmp_path / "lab"
    folder.mkdir()
    for name in ("sbatch", "squeue", "scancel", "scontrol", "sacct"):
        file = folder / name
        file.write_text(f"#!{sys.executable} -SE\n{FAKE.format(lab=str(folder))}")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    plan = read_plan(planned)
    assert plan.decision is not None
    assert plan.predicted is not None
    launch = Launch(
        plan=plan,
        decision=plan.decision,
        predicted=plan.predicted,
        steps=3,
        warmup_steps=2,
        folder=tmp_path / "trial",
        deadline_s=60.0,
    )
    return Lab(folder, launch)


@pytest.fixture
def finishing(lab: Lab) -> Callable[[int], str]:
    """A state during which the run ends: finishing(0) -> for `lab.says`."""

    def state(code: int) -> str:
        text = REPORT.model_dump_json().replace(" ", "")
        report = f"pathlib.Path({str(lab.trial / REPORT_NAME)!r}).write_text({text!r});"
        leave = f"pathlib.Path({str(lab.trial / EXIT_NAME)!r}).write_text('{code}')"
        return "run:" + ((report if code == 0 else "") + leave).replace(" ", "~")

    return state


def test_no_variable_of_sbatch_takes_a_trials_name(
    lab: Lab, finishing: Callable[[int], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_JOB_NAME", "mine")
    lab.says(finishing(0))
    assert lab.launcher()(lab.launch).status == "ok"
    assert "SBATCH_JOB_NAME" not in (lab.folder / "variables").read_text()


def test_a_trial_waits_runs_and_is_read(lab: Lab, finishing: Callable[[int], str]) -> None:
    lab.says("PENDING", "PENDING", "RUNNING RunTime=00:00:01", finishing(0))
    result = lab.launcher()(lab.launch)
    assert (result.status, result.report, result.reason) == ("ok", REPORT, "")
    assert len(lab.calls("sbatch")) == 1
    assert lab.messages[0] == "job 41 submitted"
    assert "job 41 waits: Resources" in lab.messages
    assert "job 41: RUNNING" in lab.messages
    assert not lab.calls("scancel")


def test_the_job_is_named_before_it_exists_and_known_before_it_is_awaited(lab: Lab) -> None:
    lab.says("FAILED")
    (lab.folder / "away").touch()
    with pytest.raises(SchedulerError, match="Slurm did not respond for "):
        lab.launcher()(lab.launch)
    ticket = (lab.trial / TICKET_NAME).read_text()
    assert '"job":null' in ticket.replace(" ", "")
    job = (lab.trial / JOB_NAME).read_text()
    assert "#SBATCH --job-name=moetune-" in job
    assert "#SBATCH --requeue" in job
    assert "profilers.local_ranks" in (lab.trial / NODE_NAME).read_text()


def test_a_lost_answer_of_sbatch_is_found_by_the_name_and_not_submitted_again(
    lab: Lab, finishing: Callable[[int], str]
) -> None:
    lab.says("PENDING")
    name = "moetune-0011223344556677"
    lab.trial.mkdir()
    (lab.trial / TICKET_NAME).write_text(f'{{"name": "{name}", "job": null}}')
    (lab.folder / "name").write_text(name)
    launcher = lab.launcher()
    assert launcher.holds(lab.trial)
    lab.says("RUNNING", finishing(0))
    assert launcher(lab.launch).status == "ok"
    assert not lab.calls("sbatch")


@each_row(
    ("states", "code", "held"),
    [
        (["RUNNING"], None, True),
        (["PENDING"], None, True),
        # It failed by itself, and would fail again.
        (["FAILED"], 1, True),
        (["UNKNOWN"], 1, True),
        # It ended because nobody waited, because a node died, or for reasons nobody knows.
        (["FAILED"], ABANDONED_EXIT, False),
        (["FAILED"], LOST_NODE_EXIT, False),
        (["NODE_FAIL"], None, False),
        (["CANCELLED"], None, False),
        (["UNKNOWN"], None, False),
    ],
)
def test_what_a_killed_process_left_is_taken_up_where_it_counts(
    lab: Lab, states: list[str], code: int | None, held: bool
) -> None:
    lab.forget()
    lab.says(*states)
    if code is not None:
        lab.leaves(code)
    lab.trial.mkdir(exist_ok=True)
    (lab.trial / TICKET_NAME).write_text('{"name": "moetune-1", "job": "41"}')
    assert lab.launcher().holds(lab.trial) is held


def test_a_report_counts_while_no_controller_answers(lab: Lab) -> None:
    lab.leaves(0, REPORT.model_dump_json())
    (lab.trial / TICKET_NAME).write_text('{"name": "moetune-1", "job": "41"}')
    (lab.folder / "away").touch()
    launcher = lab.launcher()
    assert launcher.holds(lab.trial)
    assert launcher(lab.launch).report == REPORT
    (lab.trial / WITHDRAWN_NAME).touch()
    assert not launcher.holds(lab.trial)


def test_a_report_that_comes_while_the_controller_is_away_is_read_at_once(lab: Lab) -> None:
    lab.says("RUNNING")

    def away(line: str) -> None:
        if line == "job 41: RUNNING":
            (lab.folder / "away").touch()
        elif "does not respond" in line:
            lab.leaves(0, REPORT.model_dump_json())

    patient = SlurmTimeouts(poll_s=0.01, lease_s=60.0, patience_s=60.0, queue_s=5.0, settle_s=0.1)
    launcher = SlurmLauncher(pace=patient, environment=os.environ, on_message=away)
    assert launcher(lab.launch).report == REPORT


def test_a_run_past_its_deadline_is_cancelled_and_waiting_does_not_count(lab: Lab) -> None:
    lab.says(*["PENDING"] * 3, "RUNNING RunTime=00:01:00", "RUNNING RunTime=00:01:01")
    result = lab.launcher()(lab.launch)
    assert result.status == "timeout"
    assert result.reason == "no report after 60 s; the trial was ended"
    assert lab.calls("scancel") == [f"scancel --name={(lab.folder / 'name').read_text()} 41"]


def test_a_hopeless_trial_is_cancelled_and_its_steps_are_kept(lab: Lab) -> None:
    lab.says("RUNNING")
    lab.trial.mkdir(exist_ok=True)
    (lab.trial / PROGRESS_NAME).write_text('{"step_s": 2.0}\n{"step_s": 2.5}\n')
    hopeless = replace(lab.launch, hopeless=lambda steps_s: "slow" if len(steps_s) > 1 else "")
    result = lab.launcher()(hopeless)
    assert (result.status, result.reason) == ("ok", "slow")
    assert result.metrics is not None
    assert result.metrics.steps_s == (2.0, 2.5)
    assert lab.calls("scancel")


def test_a_queue_that_is_too_long_ends_the_verification_and_the_job(lab: Lab) -> None:
    lab.says("PENDING")
    short = SlurmTimeouts(poll_s=0.01, lease_s=60.0, patience_s=1.0, queue_s=0.05, settle_s=1.0)
    with pytest.raises(
        SchedulerError, match=r"job 41 has waited .* \(Resources\); allow more with"
    ):
        lab.launcher(short)(lab.launch)
    assert lab.calls("scancel") == [f"scancel --name={(lab.folder / 'name').read_text()} 41"]
    assert (lab.trial / WITHDRAWN_NAME).exists()


def test_a_job_on_a_failed_node_is_awaited_when_slurm_starts_it_again(
    lab: Lab, finishing: Callable[[int], str]
) -> None:
    lab.says("RUNNING", "NODE_FAIL", "PENDING Restarts=1", "RUNNING Restarts=1", finishing(0))
    # On a busy machine the next look comes later than QUICK allows for.
    patient = replace(QUICK, settle_s=30.0)
    assert lab.launcher(patient)(lab.launch).status == "ok"


def test_a_job_that_takes_node_after_node_down_is_given_up(lab: Lab) -> None:
    lab.says("RUNNING", "PENDING Restarts=4")
    result = lab.launcher()(lab.launch)
    assert (result.status, result.reason) == ("crashed", "4 of its nodes failed")
    assert lab.calls("scancel")


@each_row(
    ("lost", "code", "reason"),
    [
        ("FAILED", LOST_NODE_EXIT, "a node of the job could not be reached any more"),
        ("UNKNOWN", None, "Slurm does not know the job any more, and it left no report"),
        ("NODE_FAIL", None, "Slurm says NODE_FAIL of the job"),
    ],
)
def test_a_trial_that_was_lost_without_a_result_has_failed(
    lab: Lab, lost: str, code: int | None, reason: str
) -> None:
    lab.forget()
    lab.says(lost)
    if code is not None:
        lab.leaves(code)
    result = lab.launcher()(lab.launch)
    assert (result.status, result.reason) == ("crashed", reason)
    assert len(lab.calls("sbatch")) == 1


def test_a_trial_that_must_not_be_repeated_is_not_submitted_anew(lab: Lab) -> None:
    lab.says("NODE_FAIL")
    once = SlurmLauncher(
        requeue=False, pace=QUICK, environment=os.environ, on_message=lab.messages.append
    )
    assert once(lab.launch).reason == "Slurm says NODE_FAIL of the job"
    assert len(lab.calls("sbatch")) == 1


@each_row(
    ("state", "code", "log", "status", "reason"),
    [
        ("OUT_OF_MEMORY", None, "", "out_of_memory", "Slurm ended the job for lack of memory"),
        ("FAILED", 77, "", "out_of_memory", "a rank ran out of memory"),
        ("FAILED", 137, "", "out_of_memory", "a process was killed by the system"),
        ("FAILED", 1, "ValueError: shapes differ", "crashed", "ValueError: shapes differ"),
        ("FAILED", ABANDONED_EXIT, "", "crashed", "the job ended itself"),
        ("TIMEOUT TimeLimit=00:03:00", None, "", "timeout", "time limit of 3.00 min; allow more"),
        ("DEADLINE", None, "", "timeout", "at its deadline; allow more with --slurm deadline="),
        ("CANCELLED", None, "", "crashed", "Slurm says CANCELLED of the job"),
        ("COMPLETED", 0, "", "crashed", "the trial ended without a readable report"),
    ],
)
def test_every_end_without_a_report_has_a_status_and_a_reason(
    lab: Lab, state: str, code: int | None, log: str, status: str, reason: str
) -> None:
    lab.forget()
    lab.says(state)
    if code is not None:
        lab.leaves(code)
    lab.trial.mkdir(exist_ok=True)
    (lab.trial / LOG_NAME).write_text(log)
    result = lab.launcher()(lab.launch)
    assert result.status == status
    assert reason in result.reason


def test_the_lease_changes_while_a_trial_is_awaited(
    lab: Lab, finishing: Callable[[int], str]
) -> None:
    leases: list[str] = []
    launcher = SlurmLauncher(
        pace=QUICK,
        environment=os.environ,
        on_message=lambda _line: leases.append((lab.trial / LEASE_NAME).read_text()),
    )
    lab.says("PENDING", "RUNNING", finishing(0))
    launcher(lab.launch)
    assert len(set(leases)) == len(leases) >= 3


def test_stopping_cancels_what_is_under_way(lab: Lab) -> None:
    lab.says("RUNNING")
    launcher = lab.launcher()
    launcher.stop()
    with pytest.raises(SchedulerError, match="cancelled"):
        launcher(lab.launch)
    assert lab.calls("scancel") == [f"scancel --name={(lab.folder / 'name').read_text()} 41"]
