"""What lies where the study of a folder belongs is one, or is refused in one line."""

import os
import sqlite3
import struct
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from tuner.errors import OutputError, PlanUnreadableError, StudyError, TunerError
from tuner.verify.study import database
from tuner.verify.study.database import open_study
from tuner.verify.study.shared import LEASE

ENDINGS = ("", "-journal", "-wal", "-shm")
RUNNING = optuna.trial.create_trial(state=TrialState.RUNNING, user_attrs={LEASE: 0})


def _open(
    file: Path, on_message: Callable[[str], None] = lambda _line: None
) -> database.StudyDatabase:
    return open_study(file, study_name="test", former=[RUNNING], on_message=on_message)


def test_devices_pipes_and_folders_in_place_of_its_files_are_refused_unread(tmp_path: Path) -> None:
    makers: dict[str, Callable[[Path], None]] = {
        "endless": lambda place: place.symlink_to("/dev/zero"),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
    }
    for maker, make in makers.items():
        for suffix in ("", "-journal", "-wal"):
            file = tmp_path / f"{maker}{suffix}" / "study.db"
            file.parent.mkdir()
            place = file.with_name(f"study.db{suffix}")
            make(place)
            with pytest.raises(PlanUnreadableError) as refused:
                _open(file)
            assert str(refused.value).startswith(f"{place}: "), place
            assert "--resume" in str(refused.value)


def _journal(*, num_pages: int, names: str = "") -> bytes:
    """Return a journal that SQLite plays back: it leaves the first pages of its file.

    Source: https://sqlite.org/fileformat.html#the_rollback_journal
    """
    header = bytes.fromhex("d9d505f920a163d7") + struct.pack(">5I", 0, 0, num_pages, 512, 4096)
    record, name = b"", names.encode()
    if name:
        record = struct.pack(f">I{len(name)}sII", 2**18 + 1, name, len(name), sum(name))
        record += header[:8]
    return header.ljust(512, b"\0") + record


def test_a_study_of_others_makes_sqlite_touch_no_file_elsewhere(tmp_path: Path) -> None:
    file, victim = tmp_path / "study.db", tmp_path / "victim"
    _open(file).close()
    sound = file.read_bytes()
    victim.write_bytes(b"dear")

    def name_it(place: Path) -> None:
        place.write_bytes(_journal(num_pages=len(sound) // 4096, names=str(victim)))

    def link_it(place: Path) -> None:
        place.unlink(missing_ok=True)
        place.symlink_to(victim)

    def link_nowhere(place: Path) -> None:
        place.unlink(missing_ok=True)
        place.symlink_to(tmp_path / "new")

    makers = [("-journal", name_it)]
    makers += [(end, link) for end in ENDINGS for link in (link_it, link_nowhere)]
    for suffix, make in makers:
        place = tmp_path / f"study.db{suffix}"
        make(place)
        with pytest.raises(PlanUnreadableError, match=r"move study\.db\* away") as refused:
            _open(file)
        assert str(refused.value).startswith(f"{place}: names another file"), place
        assert victim.read_bytes() == b"dear"
        assert not (tmp_path / "new").exists()
        # The way out that the line names.
        for left in tmp_path.glob("study.db*"):
            left.unlink()
        _open(file).close()


def test_a_study_whose_creation_was_cut_off_is_created(tmp_path: Path) -> None:
    file = tmp_path / "study.db"
    _open(file).close()
    (tmp_path / "study.db-journal").write_bytes(_journal(num_pages=0))
    with closing(_open(file)) as study:
        assert len(study.trials()) == 1


def test_a_file_that_holds_no_study_of_this_plan_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "{a}?b%20 #c" / "study.db"
    with closing(_open(file)) as study:
        assert len(study.trials()) == 1
    sound = file.read_bytes()
    statements = {
        "other tables": "CREATE TABLE x (a)",
        "no tables": "DROP TABLE trials",
        "another name": "UPDATE studies SET study_name = 'x'",
        "another release": "UPDATE alembic_version SET version_num = 'v9'",
        "no text": "UPDATE version_info SET library_version = CAST(X'86' AS TEXT)",
        "state": "UPDATE trials SET state = 'x'",
        "direction": "UPDATE study_directions SET direction = 'x'",
        "time": "UPDATE trials SET datetime_start = 'x'",
        "deep": f"UPDATE trial_user_attributes SET value_json = '{'[' * 100_000}'",
        "no JSON": "UPDATE trial_user_attributes SET value_json = 'x'",
        "parameter": "INSERT INTO trial_params VALUES (1, 1, 'x', 0, '{\"name\": \"os\"}')",
    }
    failures = []
    for name, statement in statements.items():
        file.write_bytes(b"" if name == "other tables" else sound)
        with closing(sqlite3.connect(file)) as connection, connection:
            connection.execute(statement)
        failures += _refused(file, name)
    for name, content in {
        "text": b"no database\n" * 100,
        "half": sound[: len(sound) // 2],
        "zeros": sound[:5000] + bytes(40_000) + sound[45_000:],
        "journal": b'{"op_code": 0, "worker_id": "x", "study_name": "test"}\n',
    }.items():
        file.write_bytes(content)
        failures += _refused(file, name)
    assert failures == []
    file.write_bytes(sound)
    os.truncate(file, 2**40)
    with pytest.raises(PlanUnreadableError, match="larger than"):
        _open(file)


def _refused(file: Path, name: str) -> list[str]:
    try:
        with closing(_open(file)) as study:
            study.persist(study.trials)
    except TunerError as error:
        line = str(error)
        is_sound = isinstance(error, PlanUnreadableError) and "\n" not in line
        return [] if is_sound and "move study.db* away" in line else [f"{name}: {line}"]
    except Exception as error:
        return [f"{name}: {error!r}"]
    return [f"{name}: taken for the study of this plan"]


def test_a_full_or_locked_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, said = tmp_path / "study.db", list[str]()
    for name, value_s in {"TRANSACTION_S": 0.05, "PATIENCE_S": 0.1, "PAUSE_S": 0.0}.items():
        monkeypatch.setattr(database, name, value_s)
    other = sqlite3.connect(file, isolation_level=None)

    def go_on(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            other.execute("ROLLBACK")

    with closing(other), closing(_open(file, on_message=go_on)) as study:
        # A worker that was stopped in a transaction.
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StudyError, match="database is locked; if its file system has no"):
            _open(file)
        with pytest.raises(StudyError, match="did not respond for 100 ms"):
            study.persist(lambda: study.add(RUNNING))
        assert study.persist(lambda: study.add(RUNNING)) == 1
        assert said == [f"{file} does not respond (database is locked); retrying"] * 2
        full = sqlite3.connect

        def connected(*what: object, **how: object) -> sqlite3.Connection:
            connection: sqlite3.Connection = full(*what, **how)  # type: ignore[call-overload]  # as given
            connection.execute("PRAGMA max_page_count = 1")
            return connection

        monkeypatch.setattr(sqlite3, "connect", connected)
        with closing(_open(file)) as crowded, pytest.raises(OutputError, match="disk is full"):
            crowded.persist(lambda: crowded.complete(0, 1.0, record="x" * 500_000))
        assert len(study.trials()) == 2


def test_a_trial_ends_once(tmp_path: Path) -> None:
    with closing(_open(tmp_path / "study.db")) as one, closing(_open(tmp_path / "study.db")) as two:
        one.note(0, LEASE, {"a": 1})
        assert two.trials()[0].user_attrs[LEASE] == {"a": 1}
        assert two.complete(0, 1.5)
        one.fail(0)
        assert not one.complete(0, 2.5, record=1)
        one.note(0, LEASE, {"a": 2})
        assert two.trials()[0].user_attrs[LEASE] == {"a": 1}
        assert (one.trials()[0].state, one.trials()[0].value) == (TrialState.COMPLETE, 1.5)
