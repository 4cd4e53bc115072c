from pathlib import Path

import pytest

from profilers.errors import RecordingUnreadableError
from profilers.routing.capture import text
from profilers.routing.capture.text import as_bytes, pieces, sequences


def test_files_are_one_stream_of_equal_sequences(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "below").mkdir(parents=True)
    (folder / "b.txt").write_text("fgh")
    (folder / "a.txt").write_text("abcde")
    (folder / "below" / "c.txt").write_text("ij")
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    found = ["".join(map(chr, row)) for row in sequences([folder], encode=as_bytes, length=3)]
    assert found == ["abc", "def", "ghi"]


def test_what_is_left_counts_only_where_it_is_all(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("ab")
    assert list(sequences([tmp_path / "a"], encode=as_bytes, length=3)) == [[97, 98]]


def test_a_large_file_comes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "PIECE", 4)
    (tmp_path / "a").write_text("äöüßäö", encoding="utf-8")
    assert list(pieces([tmp_path / "a"])) == ["äöüß", "äö"]


def test_what_is_named_must_be_text(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc\xff")
    with pytest.raises(RecordingUnreadableError, match=r"no UTF-8 text: .* at byte 3"):
        list(pieces([tmp_path / "a"]))
    with pytest.raises(RecordingUnreadableError, match="No such file"):
        list(pieces([tmp_path / "b"]))
    (tmp_path / "empty").write_text("")
    with pytest.raises(RecordingUnreadableError, match="no text in there"):
        list(sequences([tmp_path / "empty"], encode=as_bytes, length=3))
