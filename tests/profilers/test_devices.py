from pathlib import Path

import pytest
import torch

from profilers.devices import cache_bytes, last_cache_bytes, stated_cache_bytes
from tests.rows import each_row

CPU = torch.device("cpu")


@each_row(
    ("text", "expected"),
    [
        ("1024K\n", 2**20),
        ("36608K", 36608 * 1024),
        ("", 7),
        ("K", 7),
        ("many", 7),
        ("-1K", 7),
        ("1.5K", 7),
        ("32M", 7),
    ],
)
def test_a_cache_is_as_large_as_linux_states_and_else_as_usual(
    tmp_path: Path, text: str, expected: int
) -> None:
    size = tmp_path / "size"
    size.write_text(text)
    assert stated_cache_bytes(size, otherwise=7) == expected


def test_a_size_that_is_not_stated_is_the_usual_one(tmp_path: Path) -> None:
    assert stated_cache_bytes(tmp_path / "absent", otherwise=7) == 7
    (tmp_path / "size").write_bytes(b"\xff\xfe")
    assert stated_cache_bytes(tmp_path / "size", otherwise=7) == 7


def test_the_last_cache_of_a_processor_is_read_from_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, last = tmp_path / "core", tmp_path / "last"
    core.write_text("512K\n")
    last.write_text("4096K\n")
    monkeypatch.setattr("profilers.devices.CORE_CACHE", core)
    monkeypatch.setattr("profilers.devices.LAST_CACHE", last)
    assert (cache_bytes(CPU), last_cache_bytes(CPU)) == (512 * 1024, 4096 * 1024)
    last.unlink()
    assert last_cache_bytes(CPU) == 32 * 2**20
