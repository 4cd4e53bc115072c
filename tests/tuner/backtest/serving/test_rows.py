"""Serving tables as untrusted text."""

from pathlib import Path

import pytest

from tuner.backtest.serving.rows import is_serving_table, read_cells
from tuner.errors import SpecError


def table(folder: Path, content: bytes) -> Path:
    file = folder / "runs.csv"
    file.write_bytes(content)
    return file


def test_a_table_is_recognised_by_its_measured_columns(tmp_path: Path) -> None:
    assert is_serving_table(table(tmp_path, b"id,silicon_ttft_ms,silicon_tpot_ms\n"))
    assert not is_serving_table(table(tmp_path, b"id,step_time_s\n"))
    assert not is_serving_table(table(tmp_path, b""))
    assert not is_serving_table(table(tmp_path, b"\xff\xfe\x00"))


def test_short_lines_read_as_blank_cells(tmp_path: Path) -> None:
    file = table(tmp_path, b"id,silicon_ttft_ms,silicon_tpot_ms\na,1\nb,1,2,3\n")
    first, second = read_cells(file)
    assert first["silicon_tpot_ms"] == ""
    assert second["id"] == "b"


def test_what_is_no_table_is_refused(tmp_path: Path) -> None:
    for content, why in (
        (b"id\n\xff\n", "not UTF-8"),
        (b"id,silicon_ttft_ms,silicon_tpot_ms\n", "no rows"),
    ):
        with pytest.raises(SpecError, match=why):
            read_cells(table(tmp_path, content))
    with pytest.raises(SpecError, match="cannot read"):
        is_serving_table(tmp_path / "none.csv")
