import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.expect import refused
from tests.rows import each_row
from tuner.errors import OutputError
from tuner.output import write_directory, write_files


def _left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_files_appear_with_their_content_and_mode(tmp_path: Path) -> None:
    out = tmp_path / "plan"
    write_directory(
        out, {"plan.json": "{}\n", "launch/run.sh": b"#!/bin/sh\n"}, executable=["launch/run.sh"]
    )
    assert (out / "plan.json").read_text() == "{}\n"
    assert os.access(out / "launch" / "run.sh", os.X_OK)
    assert not os.access(out / "plan.json", os.X_OK)
    assert _left(tmp_path) == ["launch", "plan", "plan.json", "run.sh"]


def test_an_existing_directory_keeps_its_other_files(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "old").write_text("old")
    write_directory(tmp_path, {"old": "new"})
    assert (tmp_path / "kept").read_text() == "kept"
    assert (tmp_path / "old").read_text() == "new"


def test_a_directory_is_written_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []

    def full_disk_at_second(descriptor: int) -> None:
        synced.append(descriptor)
        if len(synced) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk_at_second)
    with refused(OutputError, "plan'", match="No space left on device"):
        write_directory(tmp_path / "plan", {"a": "a", "b": "b"})
    assert _left(tmp_path) == []


def test_a_full_disk_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plan.json").write_text("old")

    def full_disk(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OutputError, match="No space left on device"):
        write_files(tmp_path, {"plan.json": "new"})
    assert (tmp_path / "plan.json").read_text() == "old"
    assert _left(tmp_path) == ["plan.json"]


def test_ctrl_c_leaves_no_unfinished_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_directory(tmp_path / "plan", {"a": "a"})
    with pytest.raises(KeyboardInterrupt):
        write_files(tmp_path, {"a": "a"})
    assert _left(tmp_path) == []


@each_row(
    ("write", "said"),
    [
        (write_directory, "choose another place with -o"),
        (partial(write_files, option="--junit"), "choose another place with --junit"),
        # As `verify` does, which writes into the plan's own folder.
        (write_files, "fix that and run this again"),
    ],
)
def test_a_file_in_the_way_is_one_line(
    write: Callable[..., None], said: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=rf"cannot write .*: [A-Z][a-z ]+; {said}$"):
        write(tmp_path / "file" / "plan", {"a": "a"})


@each_row("name", ["../a", "/etc/a", "b/../../a"])
def test_a_name_that_leaves_the_directory_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="leaves its directory"):
        write_directory(tmp_path / "plan", {name: ""})
    assert _left(tmp_path) == []


def test_a_device_or_a_pipe_is_refused_and_stays(tmp_path: Path) -> None:
    # Through links: what is replaced by mistake is the link and not the machine's device.
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "pipe")
    for name in ("null", "zero", "pipe"):
        with pytest.raises(OutputError, match="not a regular file; fix"):
            write_files(tmp_path, {name: "text"})
        assert not (tmp_path / name).is_file(), name
    (tmp_path / "kept").write_text("old")
    (tmp_path / "link").symlink_to("kept")
    write_files(tmp_path, {"link": "new"})
    assert (tmp_path / "link").read_text() == "new"
    assert _left(tmp_path) == ["kept", "link", "null", "pipe", "zero"]


def test_of_two_who_write_one_new_folder_the_second_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = os.fsync

    def meanwhile(descriptor: int) -> None:
        (tmp_path / "plan").mkdir()
        (tmp_path / "plan" / "plan.json").write_text("the first's")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", meanwhile)
    with pytest.raises(OutputError, match="another command has just written"):
        write_directory(tmp_path / "plan", {"plan.json": "the second's"})
    assert _left(tmp_path) == ["plan", "plan.json"]
    assert (tmp_path / "plan" / "plan.json").read_text() == "the first's"
