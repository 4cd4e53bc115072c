from collections.abc import Callable
from typing import Any

import pytest

from solvers.layout.problem import LayoutProblem


@pytest.fixture
def two_stages() -> Callable[..., LayoutProblem]:
    """2 + 2 layers on two devices under a fast and a lean option; any field can be replaced."""

    def make(**changes: Any) -> LayoutProblem:
        given: dict[str, Any] = {
            "run_lengths": (2, 2),
            "device_of_stage": (0, 1),
            "options": ("fast", "lean"),
            "time_s_RO": [[1.0, 2.0], [3.0, 5.0]],
            "fixed_time_s_S": [0.5, 0.25],
            "static_bytes_R": [10, 20],
            "fixed_bytes_S": [5, 7],
            "saved_bytes_RO": [[8, 1], [16, 2]],
            "fixed_saved_bytes_S": [3, 0],
            "transient_bytes_RO": [[0, 4], [0, 9]],
            "in_flight_S": (2, 1),
            "memory_limit_bytes_D": [100, 100],
            "num_microbatches": 3,
        }
        return LayoutProblem(**(given | changes))

    return make
