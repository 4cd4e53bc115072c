"""Layouts of a model of published size."""

import pytest

from solvers.registry import LAYOUT
from solvers.result import Status
from tests.solvers.layout.testing import large_problem


def test_a_very_large_model_is_solved() -> None:
    outcome = LAYOUT.solve(large_problem(), time_limit_s=60.0)
    assert outcome.status is Status.OPTIMAL
    assert outcome.objective == pytest.approx(10.17716, rel=1e-6)
