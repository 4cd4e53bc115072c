"""A study in PostgreSQL: what is refused, what is kept secret, and what a broken turn leaves."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.rows import each_row
from tuner.errors import PlanUnreadableError, SpecError, StudyError
from tuner.plans.folder import trial_file, write_trial
from tuner.verify.neighbourhood import Neighbourhood
from tuner.verify.proposal import Proposal
from tuner.verify.records import TrialRecord, read_trials
from tuner.verify.search import LaunchRequest, StudySearch, join_study
from tuner.verify.study.claims import StudyCallbacks, StudySnapshot
from tuner.verify.study.membership import EarlierTrials
from tuner.verify.study.postgres import PostgresStore
from tuner.verify.study.worker import this_worker

DecisionSpace = Callable[..., Neighbourhood]
Record = Callable[..., TrialRecord]


class Server(NamedTuple):
    url: str
    password: str


def _silent(_line: str) -> None:
    pass


@each_row(
    "url",
    [
        "sqlite:///trials.db",
        "mysql://moetune:hunter2@db/trials",
        "redis://:hunter2@db",
        "trials.db",
        "postgresqlish://moetune:hunter2@db/trials",
        "postgresql://moetune:hunter2@db:port/trials",
        "postgres",
        "postgresql:hunter2@db",
    ],
)
def test_what_is_no_url_of_postgresql_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(SpecError) as refused:
        PostgresStore(url, study_name="s", on_message=_silent)
    (line,) = str(refused.value).splitlines()
    assert "postgresql://" in line
    assert "hunter2" not in line


@each_row(
    ("login", "query"),
    [
        ("moetune:hunter2", ""),
        ("moetune", "&password=hunter2"),
        ("moetune", "&sslpassword=hunter2"),
    ],
)
def test_a_server_that_is_not_there_is_one_line_without_the_password(
    tmp_path: Path, login: str, query: str
) -> None:
    pytest.importorskip("psycopg")
    url = f"postgresql://{login}@/trials?host={tmp_path}{query}"
    with pytest.raises(StudyError) as away:
        PostgresStore(url, study_name="s", on_message=_silent)
    (line,) = str(away.value).splitlines()
    assert line.startswith(f"postgresql://{login.replace('hunter2', '***')}@/trials")
    assert "hunter2" not in line


@contextmanager
def _study(
    server: Server, space: Neighbourhood, folder: Path, *, name: str, **what: Any
) -> Iterator[tuple[StudySearch, PostgresStore]]:
    store = PostgresStore(server.url, study_name=name, on_message=_silent)
    outside = StudyCallbacks(
        write=lambda record: write_trial(folder, record),
        is_written=lambda number: trial_file(folder, number).is_file(),
        adopt=lambda _proposal: False,
        on_message=_silent,
    )
    left = EarlierTrials(finished=read_trials(folder / "trials"))
    with join_study(space, store=store, left=left, outside=outside, **what) as study:
        yield study, store


def _anything(_progress: StudySnapshot) -> list[LaunchRequest]:
    return [LaunchRequest()]


def _proposed(study: StudySearch) -> Proposal:
    result = study.next(_anything)
    assert isinstance(result, Proposal)
    return result


def _cut_off(server: Server) -> None:
    """End whoever has the turn."""
    import psycopg

    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory'"
        )


@pytest.fixture
def served(postgres: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server, its password where libpq looks for it."""
    monkeypatch.setenv("PGPASSWORD", postgres.password)
    return postgres


@pytest.mark.slow
def test_a_wrong_password_is_one_line_without_it(
    postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", "hunter2")
    with pytest.raises(StudyError, match="password authentication failed") as refused:
        PostgresStore(postgres.url, study_name="s", on_message=_silent)
    assert len(str(refused.value).splitlines()) == 1
    assert "hunter2" not in str(refused.value)


@pytest.mark.slow
def test_folders_that_are_not_shared_hold_the_same_records_and_no_password(
    served: Server, planned: Path, tmp_path: Path, space: DecisionSpace, record: Record
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    near = space(planned)
    with _study(served, near, one, name="mirror") as (first, _):
        proposal = _proposed(first)
        assert first.report(proposal, record(proposal.number, decision=proposal.decision))
        with _study(served, near, two, name="mirror") as (second, _):
            other = _proposed(second)
            assert other.decision != proposal.decision
            assert second.report(other, record(other.number, decision=other.decision))
            assert len(read_trials(two / "trials")) == 2
        first.next(lambda _progress: [])
    assert read_trials(one / "trials") == read_trials(two / "trials") == first.records
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert files
    assert not any(served.password.encode() in file.read_bytes() for file in files)
    # A deleted copy comes back: the study holds the record.
    trial_file(two, proposal.number).unlink()
    with _study(served, near, two, name="mirror"):
        assert len(read_trials(two / "trials")) == 2


@pytest.mark.slow
def test_a_turn_that_the_server_ended_is_taken_again_and_leaves_nothing(
    served: Server, planned: Path, tmp_path: Path, space: DecisionSpace, record: Record
) -> None:
    near = space(planned)
    cuts = iter([True])

    def requests(progress: StudySnapshot) -> list[LaunchRequest]:
        if next(cuts, False):
            _cut_off(served)
        return _anything(progress)

    with _study(served, near, tmp_path, name="cut") as (study, _):
        result = study.next(requests)
        assert isinstance(result, Proposal)
        assert result.decision == near.plan.decision
        assert study.report(result, record(result.number, decision=result.decision))
        assert [one.number for one in study.records] == []
        study.next(lambda _progress: [])
        assert [one.number for one in study.records] == [result.number]
        assert _proposed(study).decision != result.decision


@pytest.mark.slow
def test_patience_begins_with_the_first_failure_and_ends(
    served: Server,
    planned: Path,
    tmp_path: Path,
    space: DecisionSpace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tuner.verify.study.postgres.PATIENCE_S", 1.0)
    monkeypatch.setattr("tuner.verify.study.postgres.PAUSE_S", 0.1)
    began: list[float] = []

    def broken(failures: int) -> Callable[[], int]:
        """A turn longer than patience, at the end of which the server is lost so many times."""

        def action() -> int:
            began.append(time.monotonic())
            if len(began) == 1:
                time.sleep(1.2)
            if len(began) <= failures:
                _cut_off(served)
            return len(began)

        return action

    with _study(served, space(planned), tmp_path, name="patient") as (_, store):
        assert store.exclusively(broken(1)) == 2
        began.clear()
        with pytest.raises(StudyError, match="did not respond for 1"):
            store.exclusively(broken(10**6))
    assert len(began) > 2


@pytest.mark.slow
def test_a_folder_of_another_study_is_not_mixed_in(
    served: Server, planned: Path, tmp_path: Path, space: DecisionSpace, record: Record
) -> None:
    near = space(planned)
    with _study(served, near, tmp_path / "one", name="mixed") as (study, _):
        proposal = _proposed(study)
        assert study.report(proposal, record(proposal.number, decision=proposal.decision))
    write_trial(tmp_path / "two", record(0, measured_s=9.0))
    with (
        pytest.raises(PlanUnreadableError, match="move the folder of trials away"),
        _study(served, near, tmp_path / "two", name="mixed"),
    ):
        pass


@pytest.mark.slow
def test_a_worker_that_signed_off_is_followed_at_once(
    served: Server, planned: Path, tmp_path: Path, space: DecisionSpace
) -> None:
    near = space(planned)
    elsewhere = this_worker().model_copy(update={"place": "another boot"})
    with _study(served, near, tmp_path, name="left", worker=elsewhere) as (study, store):
        begun = _proposed(study)
        assert set(store.heartbeats()) == {elsewhere.token}
    with _study(served, near, tmp_path, name="left") as (study, store):
        assert elsewhere.token not in store.heartbeats()
        assert _proposed(study).decision == begun.decision
