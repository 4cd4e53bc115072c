"""Trials that outlive their process: who goes on with them, and who leaves them alone."""

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tuner.plans.folder import STUDY_NAME, TRIALS_NAME
from tuner.verify.durable_trials import adopt_trial, note, read_running_trials, sweep, trial_folder
from tuner.verify.launcher import Launch, LaunchResult
from tuner.verify.neighbourhood import Neighbourhood
from tuner.verify.proposal import LaunchRequest, Proposal
from tuner.verify.records import TrialRecord
from tuner.verify.search import StudySearch
from tuner.verify.study import database
from tuner.verify.study.database import StudyDatabase
from tuner.verify.study.lease import this_worker
from tuner.verify.study.shared import StudySnapshot

DecisionSpace = Callable[..., Neighbourhood]
Record = Callable[..., TrialRecord]
Join = Callable[..., StudySearch]

PLAN = "a" * 64


class Jobs:
    """A launcher whose jobs go on until they are forgotten."""

    def __init__(self) -> None:
        self.alive: set[Path] = set()

    def __call__(self, launch: Launch) -> LaunchResult:
        raise AssertionError(launch)

    def holds(self, folder: Path) -> bool:
        return folder in self.alive

    def forget(self, folder: Path) -> None:
        self.alive.discard(folder)

    def stop(self) -> None:
        self.alive.clear()

    def begin(self, place: Path, proposal: Proposal, *, plan_sha256: str = PLAN) -> Path:
        folder = trial_folder(place, proposal.number)
        note(folder, proposal, plan_sha256=plan_sha256)
        self.alive.add(folder)
        return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "under-way"


def _anything(_progress: StudySnapshot) -> list[LaunchRequest]:
    return [LaunchRequest()]


def _proposed(study: StudySearch) -> Proposal:
    result = study.propose(_anything)
    assert isinstance(result, Proposal)
    return result


def _adopting(jobs: Jobs, place: Path) -> Callable[[Proposal], bool]:
    return lambda proposal: adopt_trial(place, jobs, proposal, plan_sha256=PLAN)


def test_the_job_of_a_dead_worker_goes_on_under_its_number(
    planned: Path, space: DecisionSpace, record: Record, join: Join, place: Path
) -> None:
    jobs = Jobs()
    begun = _proposed(join(space(planned), planned))
    folder = jobs.begin(place, begun)
    next_one = join(space(planned), planned, adopt=_adopting(jobs, place), worker=this_worker())
    sweep(place, jobs, running=next_one.running)
    assert _proposed(next_one) == begun
    assert _proposed(next_one).decision != begun.decision
    assert jobs.alive == {folder}
    assert next_one.record(begun, record(begun.number, decision=begun.decision))


def test_a_job_goes_on_when_the_database_fails_after_its_lease_was_taken(
    planned: Path, space: DecisionSpace, join: Join, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, swap, said = Jobs(), StudyDatabase.compare_and_swap, list[str]()
    begun = _proposed(join(space(planned), planned))
    jobs.begin(place, begun)
    broken = sqlite3.OperationalError("disk I/O error")
    broken.sqlite_errorname = "SQLITE_IOERR_READ"

    def failing(*what: Any, **named: Any) -> bool:
        assert swap(*what, **named)
        monkeypatch.setattr(StudyDatabase, "compare_and_swap", swap)
        raise broken

    monkeypatch.setattr(database, "PAUSE_S", 0.0)
    monkeypatch.setattr(StudyDatabase, "compare_and_swap", failing)
    how = {"adopt": _adopting(jobs, place), "on_message": said.append}
    next_one = join(space(planned), planned, worker=this_worker(), **how)
    assert [line.partition(" does not respond ")[2] for line in said] == [
        "(disk I/O error); retrying"
    ]
    assert _proposed(next_one) == begun
    assert jobs.alive


def test_a_job_that_has_gone_frees_its_decision_and_leaves_no_folder(
    planned: Path, space: DecisionSpace, join: Join, place: Path
) -> None:
    jobs = Jobs()
    begun = _proposed(join(space(planned), planned))
    folder = jobs.begin(place, begun)
    jobs.alive.clear()
    next_one = join(space(planned), planned, adopt=_adopting(jobs, place))
    repeated = _proposed(next_one)
    assert repeated.decision == begun.decision
    assert repeated.number != begun.number
    assert not folder.exists()


def test_jobs_of_a_worker_that_lives_are_left_alone(
    planned: Path, space: DecisionSpace, join: Join, place: Path
) -> None:
    jobs = Jobs()
    begun = _proposed(join(space(planned), planned, worker=this_worker()))
    folder = jobs.begin(place, begun)
    beside = join(space(planned), planned, adopt=_adopting(jobs, place), worker=this_worker())
    sweep(place, jobs, running=beside.running)
    assert _proposed(beside).decision != begun.decision
    assert jobs.alive == {folder}
    assert folder.is_dir()


def test_a_job_outlives_the_loss_of_the_study(
    planned: Path, space: DecisionSpace, join: Join, place: Path
) -> None:
    jobs = Jobs()
    begun = _proposed(join(space(planned), planned))
    jobs.begin(place, begun)
    (planned / TRIALS_NAME / STUDY_NAME).unlink()
    running = read_running_trials(place, plan_sha256=PLAN)
    next_one = join(
        space(planned), planned, running=running, adopt=_adopting(jobs, place), worker=this_worker()
    )
    assert _proposed(next_one) == begun


def test_what_belongs_to_another_plan_is_ended(
    planned: Path, space: DecisionSpace, join: Join, place: Path
) -> None:
    jobs = Jobs()
    study = join(space(planned), planned, adopt=_adopting(jobs, place), worker=this_worker())
    strange = Proposal(number=7, decision=_proposed(study).decision, origin="plan")
    folder = jobs.begin(place, strange, plan_sha256="b" * 64)
    assert read_running_trials(place, plan_sha256=PLAN) == ()
    sweep(place, jobs, running=study.running)
    assert not jobs.alive
    assert not folder.exists()
