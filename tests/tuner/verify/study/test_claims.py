"""Two workers on one journal, step by step: claims, leases, and results that come too late."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rows import each_row
from tuner.errors import OutputError, PlanUnreadableError, StudyError
from tuner.plans.folder import JOURNAL_NAME, TRIALS_NAME, WORKERS_SUFFIX, trial_file
from tuner.verify.neighbourhood import Neighbourhood
from tuner.verify.proposal import Proposal
from tuner.verify.records import TrialRecord, read_trials
from tuner.verify.search import LaunchRequest, RequestSource, StudySearch, Waiting, join_study
from tuner.verify.study.claims import StudyCallbacks, StudySnapshot
from tuner.verify.study.journal import JournalStore
from tuner.verify.study.membership import EarlierTrials
from tuner.verify.study.worker import Attendance, Worker, WorkerHeartbeat, this_worker

DecisionSpace = Callable[..., Neighbourhood]
Record = Callable[..., TrialRecord]
Join = Callable[..., StudySearch]


def _up_to(trials: int) -> RequestSource:
    def requests(progress: StudySnapshot) -> list[LaunchRequest]:
        return [LaunchRequest()] if len(progress.records) + len(progress.open) < trials else []

    return requests


def _anything(_progress: StudySnapshot) -> list[LaunchRequest]:
    return [LaunchRequest()]


def _proposed(study: StudySearch, requests: RequestSource = _anything) -> Proposal:
    result = study.next(requests)
    assert isinstance(result, Proposal)
    return result


def _answer(study: StudySearch, proposal: Proposal, record: Record, **what: Any) -> bool:
    return study.report(proposal, record(proposal.number, decision=proposal.decision, **what))


class Patience:
    """An attendance whose clock the test turns."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.attendance = Attendance(lease_s=60.0, now_s=lambda: self.now_s)

    def outlast(self, study: StudySearch) -> None:
        """Look for longer than the lease."""
        for _ in range(8):
            self.now_s += 10.0
            study.next(lambda _progress: [])


def test_living_workers_share_the_trials_and_see_each_others_results(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one, two = (join(space(planned), planned, worker=this_worker()) for _ in range(2))
    first, second = _proposed(one, _up_to(2)), _proposed(two, _up_to(2))
    assert first.decision != second.decision
    assert first.number != second.number
    waiting = two.next(_up_to(2))
    assert isinstance(waiting, Waiting)
    assert {proposal.number for proposal in waiting.open} == {first.number, second.number}
    assert _answer(one, first, record)
    assert _answer(two, second, record)
    assert one.next(_up_to(2)) is None
    assert two.next(_up_to(2)) is None
    assert one.records == two.records == read_trials(planned / TRIALS_NAME)
    assert [seen.decision for seen in one.records] == [first.decision, second.decision]


class Mute(JournalStore):
    """A store whose beats never come back with those of others, as when a write fails."""

    def heartbeat(self, heartbeat: WorkerHeartbeat) -> None:
        super().heartbeat(heartbeat)


def test_a_beat_that_failed_makes_nobody_count_as_gone(
    planned: Path, space: DecisionSpace, join: Join
) -> None:
    outside = StudyCallbacks(
        write=lambda _record: None,
        is_written=lambda _number: True,
        adopt=lambda _proposal: False,
        on_message=lambda _line: None,
    )
    store = Mute(
        planned / TRIALS_NAME / JOURNAL_NAME, study_name="test", on_message=outside.on_message
    )
    with join_study(space(planned), store=store, left=EarlierTrials(), outside=outside) as one:
        newcomer = join(space(planned), planned, worker=this_worker())
        begun = _proposed(newcomer)
        waiting = one.next(lambda _progress: [])
        assert isinstance(waiting, Waiting)
        assert waiting.open == (begun,)


def test_a_worker_that_was_stopped_beyond_its_lease_brings_nothing_any_more(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    said: list[str] = []
    patience = Patience()
    stopped = join(space(planned), planned, worker=this_worker(), on_message=said.append)
    lost = _proposed(stopped)
    other = join(space(planned), planned, worker=this_worker(), attendance=patience.attendance)
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
    stopped.next(lambda _progress: [])
    (kept,) = [one for one in stopped.records if one.decision == lost.decision]
    assert kept.measured_step_s == 3.0
    assert [one.number for one in read_trials(planned / TRIALS_NAME)] == [repeated.number]


def test_a_worker_that_wakes_is_back_before_it_claims(
    planned: Path, space: DecisionSpace, join: Join
) -> None:
    patience = Patience()
    stopped = join(space(planned), planned, worker=this_worker())
    other = join(space(planned), planned, worker=this_worker(), attendance=patience.attendance)
    patience.outlast(other)
    begun = _proposed(stopped)
    assert isinstance(other.next(lambda _progress: []), Waiting)
    assert _proposed(other).decision != begun.decision


@each_row("is_written", [False, True])
def test_a_result_that_was_written_but_not_told_is_completed_by_the_next(
    bound_plan: Path,
    tmp_path: Path,
    space: DecisionSpace,
    record: Record,
    join: Join,
    is_written: bool,
) -> None:
    planned = Path(shutil.copytree(bound_plan, tmp_path / f"written {is_written}"))

    def write_and_die(written: TrialRecord) -> None:
        if is_written:
            trial_file(planned, written.number).write_text(written.model_dump_json())
        raise OutputError("no space left")

    killed = join(space(planned), planned, write=write_and_die)
    proposal = _proposed(killed)
    with pytest.raises(OutputError):
        _answer(killed, proposal, record)
    next_one = join(space(planned), planned, read_trials(planned / TRIALS_NAME))
    assert _proposed(next_one).decision != proposal.decision
    assert [one.number for one in next_one.records] == [proposal.number]
    assert read_trials(planned / TRIALS_NAME) == next_one.records


def _refusing(finished: tuple[TrialRecord, ...]) -> EarlierTrials:
    return EarlierTrials(finished=finished, may_go_on=False, refusal="add --resume")


def test_a_study_that_somebody_is_at_is_joined_only_when_asked_to(
    planned: Path, space: DecisionSpace, record: Record, join: Join, ghost: Callable[[], Worker]
) -> None:
    join(space(planned), planned, left=_refusing(()), worker=ghost())
    alive = join(space(planned), planned, worker=this_worker())
    assert _answer(alive, _proposed(alive), record)
    finished = read_trials(planned / TRIALS_NAME)
    for left in (_refusing(finished), _refusing(())):
        with pytest.raises(StudyError, match=r"another `moetune verify` .* add --resume to join"):
            join(space(planned), planned, left=left, worker=this_worker())
    joined = join(space(planned), planned, finished, worker=this_worker())
    assert _proposed(joined).decision != finished[0].decision


def test_trials_of_the_dead_are_gone_on_with_when_asked_to(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    dead = join(space(planned), planned)
    assert _answer(dead, _proposed(dead), record)
    finished = read_trials(planned / TRIALS_NAME)
    with pytest.raises(PlanUnreadableError, match="add --resume"):
        join(space(planned), planned, left=_refusing(finished))


def test_whoever_may_live_elsewhere_is_watched_before_it_is_called_dead(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    patience = Patience()
    elsewhere = this_worker().model_copy(update={"place": "another boot"})
    silent = join(space(planned), planned, worker=elsewhere)
    assert _answer(silent, _proposed(silent), record)
    paused: list[float] = []

    def pause(seconds: float) -> None:
        paused.append(seconds)
        patience.now_s += seconds

    with pytest.raises(PlanUnreadableError, match="add --resume"):
        join(
            space(planned),
            planned,
            left=_refusing(read_trials(planned / TRIALS_NAME)),
            worker=this_worker(),
            attendance=patience.attendance,
            pause=pause,
        )
    assert 60.0 <= sum(paused) <= 63.0


def test_a_record_is_deleted_for_good_only_when_nobody_is_at_work(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    alive = join(space(planned), planned, worker=this_worker())
    proposal = _proposed(alive)
    assert _answer(alive, proposal, record)
    trial_file(planned, proposal.number).unlink()
    beside = join(space(planned), planned, worker=this_worker())
    assert _proposed(beside).decision != proposal.decision
    assert trial_file(planned, proposal.number).is_file()


def test_half_a_line_of_a_killed_worker_stops_nobody(
    planned: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    alive = join(space(planned), planned, worker=this_worker())
    journal = planned / TRIALS_NAME / JOURNAL_NAME
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_code":4,"wor')
    proposal = _proposed(alive)
    assert journal.read_bytes().startswith(whole + b'{"op_code":')
    with journal.open("ab") as file:
        file.write(b'{"op_')
    beside = join(space(planned), planned, worker=this_worker())
    assert _proposed(beside).decision != proposal.decision
    assert _answer(alive, proposal, record)


def test_a_journal_is_not_replaced_under_somebody_at_work(
    planned: Path, space: DecisionSpace, join: Join
) -> None:
    alive = join(space(planned), planned, worker=this_worker())
    assert alive.records == ()
    journal = planned / TRIALS_NAME / JOURNAL_NAME
    journal.write_bytes(b"garbage\n" + journal.read_bytes())
    with pytest.raises(PlanUnreadableError, match="others work on it"):
        join(space(planned), planned, worker=this_worker())


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
    assert isinstance(two.next(repeated), Waiting)
    assert _answer(one, repeat, record, origin="repeat")
    assert _proposed(two, repeated).number > repeat.number


def test_nothing_is_left_of_workers_that_have_gone(
    planned: Path, space: DecisionSpace, join: Join, ghost: Callable[[], Worker]
) -> None:
    killed = ghost()
    workers = planned / TRIALS_NAME / f"{JOURNAL_NAME}{WORKERS_SUFFIX}"
    assert _proposed(join(space(planned), planned, worker=killed)).number == 0
    assert [file.name for file in workers.iterdir()] == [killed.token]
    alive = this_worker()
    join(space(planned), planned, worker=alive)
    assert [file.name for file in workers.iterdir()] == [alive.token]


def test_a_claim_of_another_release_is_one_line(
    planned: Path, space: DecisionSpace, join: Join
) -> None:
    _proposed(join(space(planned), planned, worker=this_worker()))
    journal = planned / TRIALS_NAME / JOURNAL_NAME
    journal.write_bytes(journal.read_bytes().replace(b'"origin":"plan"', b'"origin":"star"'))
    with pytest.raises(StudyError, match="its claim was written by another release"):
        join(space(planned), planned, worker=this_worker())


def test_a_listing_that_lags_behind_makes_nobody_look_dead(
    planned: Path, space: DecisionSpace, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = this_worker().model_copy(update={"place": "another boot"})
    begun = _proposed(join(space(planned), planned, worker=elsewhere))
    beside = join(space(planned), planned, worker=this_worker())
    # As a client of NFS may list a folder a while after another node has written into it.
    iterdir = Path.iterdir

    def late(folder: Path) -> Iterator[Path]:
        return (file for file in iterdir(folder) if file.name != elsewhere.token)

    monkeypatch.setattr(Path, "iterdir", late)
    assert _proposed(beside).decision != begun.decision
