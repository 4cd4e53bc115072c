"""What lies where the files of a study belong is a file, or is refused before it is read."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tuner.errors import PlanUnreadableError
from tuner.verify.study.journal import JournalStore


def _store(journal: Path) -> JournalStore:
    return JournalStore(journal, study_name="test", on_message=lambda _line: None)


def test_devices_pipes_and_folders_in_place_of_its_files_are_refused_unread(tmp_path: Path) -> None:
    makers: dict[str, Callable[[Path], None]] = {
        "endless": lambda place: place.symlink_to("/dev/zero"),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
    }
    for maker, make in makers.items():
        for suffix in ("", ".lock", ".turn"):
            journal = tmp_path / f"{maker}{suffix}" / "study.journal"
            journal.parent.mkdir()
            place = journal.with_name(f"study.journal{suffix}")
            make(place)
            with pytest.raises(PlanUnreadableError) as refused:
                _store(journal)
            assert str(refused.value).startswith(f"{place}: "), place
            assert "--resume" in str(refused.value)


def test_a_journal_that_is_too_large_is_refused(tmp_path: Path) -> None:
    journal = tmp_path / "study.journal"
    journal.touch()
    _store(journal)
    os.truncate(journal, 2**40)
    with pytest.raises(PlanUnreadableError, match="larger than"):
        _store(journal)


def test_a_pipe_among_the_beats_of_workers_is_passed_over(tmp_path: Path) -> None:
    store = _store(tmp_path / "study.journal")
    os.mkfifo(tmp_path / "study.journal.workers" / "pipe")
    assert store.heartbeats() == {}
