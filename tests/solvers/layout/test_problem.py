from typing import Any

import numpy as np
import pytest

from solvers.arrays import LARGEST_BYTES
from tests.solvers.layout.testing import two_stages
from tests.solvers.refusals import unrefused


def test_fractions_of_bytes_are_rounded_against_the_plan() -> None:
    problem = two_stages(static_bytes_R=[10.2, 20.0], memory_limit_bytes_D=[99.9, np.inf])
    assert problem.static_bytes_R.tolist() == [11, 20]
    assert problem.memory_limit_bytes_D.tolist() == [99, LARGEST_BYTES]


def test_arrays_cannot_be_changed_and_are_not_the_callers() -> None:
    times = np.array([[1.0, 2.0], [3.0, 5.0]])
    problem = two_stages(time_s_RO=times)
    times[0, 0] = 7.0
    assert problem.time_s_RO[0, 0] == 1.0
    with pytest.raises(ValueError, match="read-only"):
        problem.time_s_RO[0, 0] = 7.0


def test_counts_follow_from_what_is_given() -> None:
    problem = two_stages(device_of_stage=(0, 0), memory_limit_bytes_D=[1])
    assert (problem.num_runs, problem.num_options, problem.num_layers) == (2, 2, 4)
    assert (problem.num_stages, problem.num_devices, problem.stages_per_device) == (2, 1, 2)
    assert problem.stages_of_device(0) == (0, 1)


def test_an_impossible_problem_cannot_be_made() -> None:
    rows: tuple[tuple[dict[str, Any], str], ...] = (
        ({"run_lengths": (2, 0)}, "positive counts"),
        ({"options": ()}, "at least one way"),
        ({"device_of_stage": (0, 2)}, "the same number of stages"),
        ({"device_of_stage": ()}, "the same number of stages"),
        ({"in_flight_S": (1,)}, "needs 2 counts"),
        ({"num_microbatches": 0}, "at least 1"),
        ({"time_s_RO": [[1.0, np.nan], [1.0, 1.0]]}, "time_s_RO must be finite"),
        ({"fixed_time_s_S": [-1.0, 0.0]}, "fixed_time_s_S must be finite"),
        ({"time_s_RO": [[1.0], [1.0]]}, "of shape"),
        ({"saved_bytes_RO": [[-1, 0], [0, 0]]}, "saved_bytes_RO must be bytes"),
        ({"static_bytes_R": [2**54, 0]}, "static_bytes_R must be bytes"),
        ({"static_bytes_R": [2**51, 0]}, "must stay below"),
        ({"min_layers_per_stage": 2}, "must be 0 or 1"),
        ({"run_lengths": (1,) * 2, "fixed_layout": (1, 2)}, "must place 2 layers"),
        ({"fixed_layout": (4, 0), "min_layers_per_stage": 1}, "at least 1 on each"),
    )
    assert unrefused(two_stages, rows) == []


def test_more_stages_than_layers_cannot_each_hold_one() -> None:
    with pytest.raises(ValueError, match="2 layers cannot give each of 3 stages a layer"):
        two_stages(
            run_lengths=(1, 1),
            device_of_stage=(0, 1, 2),
            in_flight_S=(1, 1, 1),
            fixed_time_s_S=[0.0] * 3,
            fixed_bytes_S=[0] * 3,
            fixed_saved_bytes_S=[0] * 3,
            memory_limit_bytes_D=[9] * 3,
            min_layers_per_stage=1,
        )
