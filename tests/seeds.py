"""Seeds for parametrised tests: a few by default, all of them under the slow mark."""

import pytest
from _pytest.mark.structures import ParameterSet


def seeds(count: int, *, default: int = 8) -> list[int | ParameterSet]:
    """Return the seeds 0 to count - 1; those from `default` on are slow."""
    return [
        seed if seed < default else pytest.param(seed, marks=pytest.mark.slow)
        for seed in range(count)
    ]
