"""A study in PostgreSQL: what is refused, what stays secret, what broken connections leave."""

import time
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from optuna.exceptions import StorageInternalError

from tests.rows import each_row
from tests.tuner.verify.testing import DecisionSpace, Join, Record
from tuner.errors import PlanUnreadableError, SpecError, StudyError
from tuner.plans.folder import trial_file
from tuner.verify.records import LaunchRequest, Proposal, read_trials
from tuner.verify.search import RequestSource, StudySearch
from tuner.verify.study import database
from tuner.verify.study.database import StudyDatabase, open_study
from tuner.verify.study.shared import StudySnapshot, former_trials, this_worker


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
        "postgresql",
        "",
        "postgresql://[",
        "postgresql://[::1:hunter2",
        "postgresql://u:hunter2@[x]/db",
    ],
)
def test_what_is_no_url_of_postgresql_is_refused_without_being_repeated(url: str) -> None:
    with pytest.raises(SpecError) as refused:
        open_study(url, study_name="s", on_message=_silent)
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
        open_study(url, study_name="s", on_message=_silent)
    (line,) = str(away.value).splitlines()
    assert line.startswith(f"postgresql://{login.replace('hunter2', '***')}@/trials")
    assert "hunter2" not in line


def _anything(_progress: StudySnapshot) -> list[LaunchRequest]:
    return [LaunchRequest()]


def _proposed(study: StudySearch, requests: RequestSource = _anything) -> Proposal:
    result = study.propose(requests)
    assert isinstance(result, Proposal)
    return result


def _cut_off(server: Server) -> None:
    """End the connections of all workers."""
    import psycopg

    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name = 'moetune'"
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
        open_study(postgres.url, study_name="s", on_message=_silent)
    assert len(str(refused.value).splitlines()) == 1
    assert "hunter2" not in str(refused.value)


@pytest.mark.slow
def test_folders_that_are_not_shared_hold_the_same_records_and_no_password(
    served: Server, planned: Path, tmp_path: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    near = space(planned)
    first = join(near, one, where=served.url)
    proposal = _proposed(first)
    assert first.record(proposal, record(proposal.number, decision=proposal.decision))
    second = join(near, two, where=served.url, worker=this_worker())
    other = _proposed(second)
    assert other.decision != proposal.decision
    assert second.record(other, record(other.number, decision=other.decision))
    first.propose(lambda _progress: [])
    assert read_trials(one / "trials") == read_trials(two / "trials") == first.records
    assert len(first.records) == 2
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(served.password.encode() in file.read_bytes() for file in files)
    # A deleted copy comes back: the study holds the record.
    trial_file(two, proposal.number).unlink()
    join(near, two, where=served.url)
    assert len(read_trials(two / "trials")) == 2
    # A folder of another study is not mixed in.
    with pytest.raises(PlanUnreadableError, match="move the folder of trials away"):
        join(near, tmp_path / "three", [record(0, measured_s=9.0)], where=served.url)


@pytest.mark.slow
def test_a_study_whose_creator_was_killed_is_completed_by_the_next(
    served: Server, planned: Path, tmp_path: Path, space: DecisionSpace, record: Record, join: Join
) -> None:
    records = [record(0), record(2, measured_s=None), record(3)]
    begun = former_trials(records)[:3]
    open_study(served.url, study_name="killed", former=begun, on_message=_silent).close()
    for _ in range(2):
        study = join(space(planned), tmp_path, records, where=served.url, name="killed")
        assert list(study.records) == records
    assert _proposed(study).number == 4


@pytest.mark.slow
def test_a_connection_that_breaks_loses_and_doubles_nothing(
    served: Server,
    planned: Path,
    tmp_path: Path,
    space: DecisionSpace,
    record: Record,
    join: Join,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database, "PAUSE_S", 0.0)
    near, said = space(planned), list[str]()
    # Records of a study that is no more begin the new one.
    study = join(near, tmp_path, [record(1)], where=served.url, name="cut", on_message=said.append)

    def requests(progress: StudySnapshot) -> list[LaunchRequest]:
        _cut_off(served)
        return _anything(progress)

    def broken(name: str) -> None:
        """Let a method do what it is for once, and fail nevertheless."""
        method, failures = getattr(StudyDatabase, name), [StorageInternalError("cut off")]

        def failing(*what: Any, **named: Any) -> Any:
            result = method(*what, **named)
            if failures:
                raise failures.pop()
            return result

        monkeypatch.setattr(StudyDatabase, name, failing)

    broken("add")
    proposal = _proposed(study, requests)
    assert near.plan.decision != proposal.decision
    broken("complete")
    assert study.record(proposal, record(proposal.number, decision=proposal.decision))
    study.propose(lambda _progress: [])
    assert [one.number for one in study.records] == [1, proposal.number]
    assert [line for line in said if "does not respond (cut off); retrying" in line] == said
    assert len(said) == 2


@pytest.mark.slow
def test_patience_begins_with_the_first_failure_and_ends(
    served: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "PATIENCE_S", 0.5)
    monkeypatch.setattr(database, "PAUSE_S", 0.1)
    began: list[float] = []

    def broken(failures: int) -> int:
        began.append(time.monotonic())
        if len(began) == 1:
            time.sleep(0.6)
        if len(began) <= failures:
            raise StorageInternalError("gone")
        return len(began)

    with closing(open_study(served.url, study_name="patient", on_message=_silent)) as study:
        assert study.persist(lambda: broken(1)) == 2
        began.clear()
        with pytest.raises(StudyError, match="did not respond for 500 ms"):
            study.persist(lambda: broken(10**6))
    assert len(began) > 2
