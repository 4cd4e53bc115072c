"""One trial against programs that answer as Slurm would, from files of the test."""

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.expect import present
from tests.rows import each_row
from tests.tuner.verify.testing import REPORT, launch_of
from tuner.errors import SchedulerError
from tuner.verify import slurm as slurm_launcher
from tuner.verify.launcher import NODE_GONE, PROGRESS_NAME, REPORT_NAME, Launch
from tuner.verify.slurm import (
    DEADLINE_EXIT,
    JOB_LOG_NAME,
    JOB_NAME,
    LOST_NODE_EXIT,
    RESTARTED,
    STARTED_NAME,
    SlurmLauncher,
)

FAKE = """
import os, pathlib, sys, time
lab = pathlib.Path({lab!r})
name, *words = pathlib.Path(sys.argv[0]).name, *sys.argv[1:]
with (lab / "asked").open("a") as asked:
    asked.write(" ".join([name, *words]) + "\\n")
if name == "sbatch":
    (lab / "variables").write_text(" ".join(os.environ))
    exec((lab / "job").read_text())
elif name == "scancel":
    (lab / "cancelled").touch()
"""


class Lab:
    """A Slurm that does what a test wants."""

    def __init__(self, folder: Path, launch: Launch) -> None:
        self.folder = folder
        self.trial = launch.folder
        self.launch = launch
        self.messages: list[str] = []

    def forget(self) -> None:
        """Forget what was asked and left."""
        shutil.rmtree(self.trial, ignore_errors=True)
        (self.folder / "asked").unlink(missing_ok=True)
        self.messages.clear()

    def does(self, *lines: str) -> None:
        """What sbatch does, in Python; `trial` is the folder."""
        head = f"trial = pathlib.Path({str(self.trial)!r})"
        (self.folder / "job").write_text("\n".join((head, *lines)))

    def runs(self, *lines: str, code: int = 0, log: str = "") -> None:
        """A job that is accepted, starts and ends so."""
        self.does(
            "print(41, flush=True)",
            f"(trial / {STARTED_NAME!r}).touch()",
            f"(trial / {JOB_LOG_NAME!r}).write_text({log!r})",
            *lines,
            f"sys.exit({code})",
        )

    def calls(self, program: str) -> list[str]:
        file = self.folder / "asked"
        lines = file.read_text().splitlines() if file.exists() else []
        return [line for line in lines if line.split()[0] == program]

    def launcher(self, **how: object) -> SlurmLauncher:
        settings = {"environment": os.environ, "on_message": self.messages.append} | how
        return SlurmLauncher(**settings)  # type: ignore[arg-type]  # a test's own words


@pytest.fixture
def lab(planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A folder of programs, and a trial to launch."""
    folder = tmp_path / "lab"
    folder.mkdir()
    for name in ("sbatch", "scancel"):
        file = folder / name
        file.write_text(f"#!{sys.executable} -SE\n{FAKE.format(lab=str(folder))}")
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(slurm_launcher, "SETTLE_S", 0.0)
    return Lab(folder, launch_of(planned, tmp_path / "trial"))


def _report(lab: Lab) -> str:
    return f"(trial / {REPORT_NAME!r}).write_text({REPORT.model_dump_json()!r})"


def test_a_trial_is_submitted_by_a_name_awaited_and_read(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = {"SBATCH_ARRAY_INX", "SBATCH_ERROR", "SBATCH_CLUSTERS", "SBATCH_GET_USER_ENV"}
    for name in (*ours, "SBATCH_ACCOUNT"):
        monkeypatch.setenv(name, "1")
    lab.runs("time.sleep(1.2)", _report(lab))
    result = lab.launcher(options=(("partition", "gpu"), ("cpus-per-task", "3")))(lab.launch)
    assert (result.status, result.report, result.reason) == ("ok", REPORT, "")
    assert lab.messages == ["job 41 submitted", "job 41 runs"]
    (call,) = lab.calls("sbatch")
    words = call.split()
    for word in ("--wait", "--parsable", "--requeue", "--partition=gpu", "--cpus-per-task=3"):
        assert words.count(word) == 1
    assert "--time=3" in words
    assert "--nodes=1" in words
    assert sum("--cpus-per-task" in word for word in words) == 1
    assert not lab.calls("scancel")
    variables = set((lab.folder / "variables").read_text().split())
    assert variables & {*ours, "SBATCH_ACCOUNT"} == {"SBATCH_ACCOUNT"}
    assert "profilers.local_ranks" in (lab.trial / JOB_NAME).read_text()


def test_devices_are_requested_as_the_user_says(lab: Lab) -> None:
    lab.runs(code=1)
    lab.launcher(options=(("gres", "gpu:8"), ("time", "00:30:00")), requeue=False)(lab.launch)
    words = lab.calls("sbatch")[0].split()
    assert "--no-requeue" in words
    assert [one for one in words if "gpu" in one or "time" in one] == [
        "--time=00:30:00",
        "--gres=gpu:8",
    ]


def test_a_hopeless_trial_is_cancelled_and_its_steps_are_kept(lab: Lab) -> None:
    steps = '{"step_s": 2.0}\n{"step_s": 2.5}\n'
    lab.runs(f"(trial / {PROGRESS_NAME!r}).write_text({steps!r})", "time.sleep(600)")
    hopeless = replace(lab.launch, hopeless=lambda steps_s: "slow" if len(steps_s) > 1 else "")
    result = lab.launcher()(hopeless)
    assert (result.status, result.reason) == ("ok", "slow")
    assert present(result.metrics).steps_s == (2.0, 2.5)
    _is_cancelled(lab)
    # One that has done all its steps is about to report.
    lab.forget()
    progress = f"(trial / {PROGRESS_NAME!r}).write_text({steps!r})"
    lab.runs(progress, "time.sleep(1.2)", _report(lab))
    assert lab.launcher()(replace(hopeless, steps=2)).report == REPORT


def _is_cancelled(lab: Lab) -> None:
    (submitted,) = lab.calls("sbatch")
    (cancelled,) = lab.calls("scancel")
    (name,) = [word for word in submitted.split() if word.startswith("--job-name=moetune-")]
    assert f"--name={name.partition('=')[2]}" in cancelled.split()


def test_a_queue_that_is_too_long_ends_the_verification_and_the_job(lab: Lab) -> None:
    lab.does("print(41, flush=True)", "time.sleep(600)")
    with pytest.raises(SchedulerError, match=r"has waited .* for its nodes; allow more with"):
        lab.launcher(queue_s=0.05)(lab.launch)
    _is_cancelled(lab)


def test_a_job_is_ended_with_the_budget(lab: Lab) -> None:
    lab.runs("time.sleep(600)")
    assert lab.launcher()(replace(lab.launch, latest_s=1.5)).status == "timeout"
    _is_cancelled(lab)


def test_what_slurm_refuses_ends_the_verification(lab: Lab) -> None:
    lab.does("sys.exit('sbatch: error: Batch job submission failed: Invalid partition')")
    with pytest.raises(SchedulerError, match=r"does not accept the trial: Batch job .* partition"):
        lab.launcher()(lab.launch)
    lab.forget()
    lab.does("sys.exit(1)")
    with pytest.raises(SchedulerError, match=r"does not accept the trial: exit code 1; resume"):
        lab.launcher()(lab.launch)


@each_row(
    ("code", "log", "status", "reason"),
    [
        (1, "error: Detected 1 oom_kill event in StepId=1.0.", "out_of_memory", "lack of memory"),
        (77, "", "out_of_memory", "a rank ran out of memory"),
        (137, "", "out_of_memory", "a process was killed by the system"),
        (1, "ValueError: shapes differ", "crashed", "ValueError: shapes differ"),
        (1, f"DUE TO PREEMPTION\n{RESTARTED}\nValueError: a", "crashed", "ValueError: a"),
        (2, "no cause\n", "crashed", "exit code 2: no cause"),
        (2, "", "crashed", "exit code 2"),
        (1, "*** JOB 41 CANCELLED AT 1 DUE TO TIME LIMIT ***", "timeout", "allow more with"),
        (DEADLINE_EXIT, "", "timeout", "no report after 60 s; the trial was ended"),
        (LOST_NODE_EXIT, "", "crashed", NODE_GONE),
        (1, "*** JOB 41 CANCELLED AT 1 DUE TO NODE FAILURE ***", "crashed", NODE_GONE),
        (0, "", "crashed", "the trial ended without a readable report"),
    ],
)
def test_every_end_without_a_report_has_a_status_and_a_reason(
    lab: Lab, code: int, log: str, status: str, reason: str
) -> None:
    lab.forget()
    lab.runs(code=code, log=log)
    result = lab.launcher()(lab.launch)
    assert result.status == status
    assert reason in result.reason
    assert "41" not in result.reason
    _is_cancelled(lab)


def test_stopping_cancels_what_is_under_way(lab: Lab) -> None:
    lab.runs("time.sleep(600)")
    launcher = lab.launcher()
    launcher.stop()
    with pytest.raises(SchedulerError, match="cancelled"):
        launcher(lab.launch)
    _is_cancelled(lab)


def test_a_job_is_cancelled_though_sbatch_does_not_end(lab: Lab) -> None:
    lab.runs(
        "import signal",
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        "time.sleep(600)",
    )
    assert lab.launcher()(replace(lab.launch, latest_s=1.5)).status == "timeout"
    _is_cancelled(lab)
