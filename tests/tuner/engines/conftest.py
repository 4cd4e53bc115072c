"""Programs that only write down how emitted scripts call them."""

from pathlib import Path

import pytest

from tests.tuner.engines.testing import Recorders


@pytest.fixture
def recorders(tmp_path: Path) -> Recorders:
    return Recorders(tmp_path / "recorders")
