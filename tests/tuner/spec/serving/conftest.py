"""Traces on disk."""

from collections.abc import Callable
from pathlib import Path

import pytest

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def written(text: str) -> Path:
        path = tmp_path / "trace"
        path.write_text(text, encoding="utf-8")
        return path

    return written
