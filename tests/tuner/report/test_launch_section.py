from pathlib import Path

from tuner.report.launch_section import MOST_FILE_BYTES, launch_section, read_launch_files


def test_only_named_launch_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "run.sh").write_text("echo é\n", encoding="utf-8")
    (tmp_path / "launch" / "left.sh").write_text("echo\n", encoding="utf-8")
    (tmp_path / "secret").write_text("x", encoding="utf-8")
    names = ("launch/run.sh", "launch/../secret", "secret", "plan.json", "launch/gone.sh")
    (file,) = read_launch_files(tmp_path, names)
    assert (file.path, file.text, file.is_whole) == ("launch/run.sh", "echo é\n", True)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "secret").write_text("x", encoding="utf-8")
    (tmp_path / "launch" / "run.sh").symlink_to(tmp_path / "secret")
    assert read_launch_files(tmp_path, ("launch/run.sh",)) == ()


def test_a_file_that_is_no_text_is_only_counted(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "map.npy").write_bytes(b"\x93NUMPY\x00\x01")
    files = read_launch_files(tmp_path, ("launch/map.npy",))
    assert files == ()
    assert "in the plan's folder: 1" in str(launch_section(files, names=("launch/map.npy",)).blocks)


def test_a_long_file_is_shown_in_part_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch" / "hosts").write_text("é" * MOST_FILE_BYTES, encoding="utf-8")
    (file,) = read_launch_files(tmp_path, ("launch/hosts",))
    assert not file.is_whole
    assert file.shown_bytes == 2 * MOST_FILE_BYTES
    assert set(file.text) == {"é"}
