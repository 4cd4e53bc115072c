"""A small recording whose numbers all differ, and what a refusal says."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from profilers.errors import RecordingUnreadableError
from profilers.routing.recording import Recording
from profilers.routing.store import read_recording


def full_recording(*, passes: int = 3, layers: int = 2, experts: int = 4) -> Recording:
    """Every array that there can be; 2 choices a token."""
    size = passes * layers * experts
    counts = np.arange(1, size + 1, dtype=np.int64).reshape(passes, layers, experts)
    between = np.arange((layers - 1) * experts**2, dtype=np.float64) + 0.5
    return Recording(
        model="tiny",
        workload="made up",
        layer_ids=tuple(range(3, 3 + layers)),
        num_decoder_layers=4 + layers,
        top_k=2,
        count_PLE=counts,
        transition_MEE=between.reshape(layers - 1, experts, experts),
        token_LTK=np.arange(layers * 10, dtype=np.int32).reshape(layers, 5, 2) % experts,
    )


@pytest.fixture
def recording() -> Recording:
    return full_recording()


@pytest.fixture
def refusal() -> Callable[[Path], str]:
    """Read what must be refused: refusal(path) -> the one line that says why."""

    def read(path: Path) -> str:
        with pytest.raises(RecordingUnreadableError) as caught:
            read_recording(path)
        message = str(caught.value)
        assert "\n" not in message
        assert str(path) in message
        return message

    return read
