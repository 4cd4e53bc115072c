"""Two workers on one study, step by step: claims, leases, and results that come too late."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial

from tests.tuner.verify.testing import DecisionSpace, Join, Joined, Record
from tuner.errors import OutputError, PlanUnreadableError, StudyError
from tuner.plans.folder import STUDY_NAME, TRIALS_NAME
from tuner.verify.records import LaunchRequest, Proposal, read_trials
from tuner.verify.search import RequestSource, StudySearch, Waiting
from tuner.verify.study.database import StudyDatabase, open_study
from tuner.verify.study.shared import (
    CLAIM,
    LEASE,
    LeaseWatch,
    StudySnapshot,
    Worker,
    former_trials,
    this_worker,
)


def _up_to(trials: int) -> RequestSource:
    def requests(progress: StudySnapshot) -> list[LaunchRequest]:
        return [LaunchRequest()] if len(progress.records) + len(progress.open) < trials else []

    return requests


def _anything(_progress: StudySnapshot) -> list[LaunchRequest]:
    return [LaunchRequest()]


def _proposed(study: StudySearch, requests: RequestSource = _anything) -> Proposal:
    result = study.propose(requests)
    assert isinstance(result, Proposal)
    return result


def _answer(study: StudySearch, proposal: Proposal, record: Record, **what: Any) -> bool:
    return study.record(proposal, record(proposal.number, decision=proposal.decision, **what))


class Patience:
    """A watch whose clock the test turns."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.watch = LeaseWatch(lease_s=60.0, now_s=lambda: self.now_s)

    def outlast(self, study: StudySearch) -> None:
        """Look for longer than the lease."""
        for _ in range(8):
            self.now_s += 10.0
            study.propose(lambda _progress: [])


def test_living_workers_share_the_trials_and_see_each_others_results(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one, two = (join(space(planned), planned, worker=this_worker()) for _ in range(2))
    first, second = _proposed(one, _up_to(2)), _proposed(two, _up_to(2))
    assert first.decision != second.decision
    assert first.number != second.number
    waiting = two.propose(_up_to(2))
    assert isinstance(waiting, Waiting)
    assert {proposal.number for proposal in waiting.open} == {first.number, second.number}
    assert _answer(one, first, record)
    assert _answer(two, second, record)
    assert one.propose(_up_to(2)) is None
    assert two.propose(_up_to(2)) is None
    assert one.records == two.records == read_trials(planned / TRIALS_NAME)
    assert [seen.decision for seen in one.records] == [first.decision, second.decision]


def test_a_worker_that_was_stopped_beyond_its_lease_brings_nothing_any_more(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    said: list[str] = []
    patience = Patience()
    stopped = join(space(planned), planned, worker=this_worker(), on_message=said.append)
    lost = _proposed(stopped)
    other = join(space(planned), planned, worker=this_worker(), watch=patience.watch)
    assert _proposed(other).decision != lost.decision
    patience.outlast(other)
    repeated = _proposed(other)
    assert repeated.decision == lost.decision
    assert repeated.number != lost.number
    assert not _answer(stopped, lost, record, measured_s=1.0)
    (line,) = said
    assert f"trial {lost.number}: another process took it over" in line
    assert _answer(other, repeated, record, measured_s=3.0)
    # It goes on as a worker like any other, and knows what came of its trial.
    stopped.propose(lambda _progress: [])
    (kept,) = [one for one in stopped.records if one.decision == lost.decision]
    assert kept.measured_step_s == 3.0
    assert [one.number for one in read_trials(planned / TRIALS_NAME)] == [repeated.number]


def test_a_result_that_was_noted_but_not_completed_is_completed_by_the_next(
    planned: Path, space: DecisionSpace, record: Record, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = join(space(planned), planned)
    proposal = _proposed(killed)
    with monkeypatch.context() as patch:
        patch.setattr(RDBStorage, "set_trial_state_values", _full)
        with pytest.raises(OutputError):
            _answer(killed, proposal, record)
    next_one = join(space(planned), planned)
    assert _proposed(next_one).decision != proposal.decision
    assert [one.number for one in next_one.records] == [proposal.number]
    assert read_trials(planned / TRIALS_NAME) == next_one.records


def _full(*_what: object) -> None:
    raise OutputError("no space left")


def test_a_record_that_could_not_be_written_is_written_by_the_next(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    killed = join(space(planned), planned, write=_full)
    proposal = _proposed(killed)
    with pytest.raises(OutputError):
        _answer(killed, proposal, record)
    assert read_trials(planned / TRIALS_NAME) == ()
    next_one = join(space(planned), planned)
    assert _proposed(next_one).decision != proposal.decision
    assert read_trials(planned / TRIALS_NAME) == next_one.records


def test_a_study_that_somebody_is_at_is_joined_only_when_asked_to(
    planned: Path, space: DecisionSpace, join: Join, ghost: Callable[[], Worker]
) -> None:
    begun = _proposed(join(space(planned), planned, may_join=False, worker=ghost()))
    alive = join(space(planned), planned, may_join=False, worker=this_worker())
    assert _proposed(alive).decision == begun.decision
    with pytest.raises(StudyError, match=r"another `moetune verify` .* add --resume to join"):
        join(space(planned), planned, may_join=False, worker=this_worker())
    assert _proposed(join(space(planned), planned, worker=this_worker())).number > begun.number


def test_a_worker_that_may_not_join_frees_the_trials_of_the_dead(
    planned: Path, space: DecisionSpace, join: Join, ghost: Callable[[], Worker]
) -> None:
    near = space(planned)
    _proposed(join(near, planned, worker=this_worker()))
    dead = _proposed(join(near, planned, worker=ghost()))
    with pytest.raises(StudyError, match="add --resume to join"):
        join(near, planned, may_join=False, worker=this_worker())
    assert _proposed(join(near, planned, worker=this_worker())).decision == dead.decision


def test_the_trial_of_a_worker_that_left_is_free_at_once(
    planned: Path, space: DecisionSpace, join: Join, joined: Joined
) -> None:
    elsewhere = this_worker().model_copy(update={"place": "another boot"})
    with joined(space(planned), planned, worker=elsewhere) as study:
        begun = _proposed(study)
    assert _proposed(join(space(planned), planned)).decision == begun.decision


def test_records_that_are_not_of_the_study_are_refused(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one = join(space(planned), planned)
    assert _answer(one, _proposed(one), record)
    (kept,) = read_trials(planned / TRIALS_NAME)
    for strange in (kept.model_copy(update={"measured_step_s": 9.0}), record(7)):
        with pytest.raises(PlanUnreadableError, match=rf"move {STUDY_NAME}\* away and go on with"):
            join(space(planned), planned, [strange])
    # The way out that the line names.
    (planned / TRIALS_NAME / STUDY_NAME).unlink()
    assert _proposed(join(space(planned), planned, [strange])).number == 8


def test_of_claims_at_the_same_moment_one_counts(
    planned: Path, space: DecisionSpace, join: Join
) -> None:
    one, two = (join(space(planned), planned, worker=this_worker()) for _ in range(2))
    others: list[Proposal] = []

    def meanwhile(_progress: StudySnapshot) -> list[LaunchRequest]:
        if not others:
            others.append(_proposed(two))
        return [LaunchRequest()]

    mine = _proposed(one, meanwhile)
    assert (others[0].number, mine.number) == (0, 2)
    assert mine.decision != others[0].decision


def test_a_trial_that_begins_while_a_worker_looks_is_seen(
    planned: Path, space: DecisionSpace, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (join(space(planned), planned, worker=this_worker()) for _ in range(2))
    others: list[Proposal] = []
    read = StudyDatabase.trials

    def trials(database: StudyDatabase) -> list[FrozenTrial]:
        seen = read(database)
        monkeypatch.setattr(StudyDatabase, "trials", read)
        others.append(_proposed(two))
        return seen

    monkeypatch.setattr(StudyDatabase, "trials", trials)
    assert _proposed(one).decision != others[0].decision
    assert len(others) == 1


def test_numbers_beyond_any_study_are_refused(record: Record) -> None:
    with pytest.raises(PlanUnreadableError, match="a trial has the number 1000000000000"):
        former_trials([record(10**12)])


def test_repeats_are_claimed_like_everything_else(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one, two = (join(space(planned), planned, worker=this_worker()) for _ in range(2))
    first = _proposed(one)
    assert _answer(one, first, record)

    def repeated(_progress: StudySnapshot) -> list[LaunchRequest]:
        return [LaunchRequest(decision=first.decision)]

    repeat = _proposed(one, repeated)
    assert repeat.origin == "repeat"
    assert repeat.decision == first.decision
    assert isinstance(two.propose(repeated), Waiting)
    assert _answer(one, repeat, record, origin="repeat")
    assert _proposed(two, repeated).number > repeat.number


def test_what_another_release_wrote_is_one_line(
    planned: Path, space: DecisionSpace, join: Join
) -> None:
    begun = _proposed(join(space(planned), planned, worker=this_worker()))
    file = planned / TRIALS_NAME / STUDY_NAME
    for key in (CLAIM, LEASE):
        with closing(open_study(file, study_name="test", on_message=print)) as study:
            study.note(begun.number, key, {"origin": "star"})
        with pytest.raises(StudyError, match=f"its {key} was written by another release"):
            join(space(planned), planned)
