"""Why a job that is alive is ended: told by its state and by what the trial was given."""

from pathlib import Path

from tests.rows import each_row
from tuner.goals.train_folder import read_plan
from tuner.verify.launcher import Launch
from tuner.verify.slurm.outcome import check_overrun
from tuner.verify.slurm.queue import JobState


@each_row(("state", "did"), [("PENDING", "waited for its nodes"), ("RUNNING", "ran")])
def test_a_job_is_ended_when_the_budget_is_over_waiting_or_not(
    planned: Path, tmp_path: Path, state: str, did: str
) -> None:
    plan = read_plan(planned)
    assert plan.decision is not None
    assert plan.predicted is not None
    launch = Launch(
        plan=plan,
        decision=plan.decision,
        predicted=plan.predicted,
        steps=3,
        warmup_steps=2,
        folder=tmp_path,
        deadline_s=20.0,
        latest_s=20.0,
    )

    def after(wall_s: float) -> str:
        result = check_overrun(JobState(state=state), launch, tmp_path, wall_s=wall_s)
        return "" if result is None else f"{result.status}: {result.reason}"

    assert not after(19.0)
    assert after(21.0) == f"timeout: the budget was over while the job {did}; it was ended"
