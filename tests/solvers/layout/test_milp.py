from collections.abc import Callable

import pytest

from solvers.layout import milp
from solvers.layout.problem import LayoutProblem
from solvers.registry import LAYOUT
from solvers.result import Status

MakeProblem = Callable[..., LayoutProblem]


@pytest.mark.parametrize(("spare_bytes", "step_s"), [(0, 2.0), (-1, 11.0)])
def test_one_byte_too_many_is_seen_through_the_tolerance_of_cbc(
    two_stages: MakeProblem, spare_bytes: int, step_s: float
) -> None:
    # Two stages of one device, two layers of 1 s and 5 GB, or of 10 s and nothing: both fast take
    # 10 GB and 2 s. One byte less memory is 1e-10 of it, far below CBC's tolerance on a row.
    problem = two_stages(
        run_lengths=(2,),
        device_of_stage=(0, 0),
        time_s_RO=[[1.0, 10.0]],
        fixed_time_s_S=[0.0, 0.0],
        static_bytes_R=[0],
        fixed_bytes_S=[0, 0],
        saved_bytes_RO=[[5_000_000_000, 0]],
        fixed_saved_bytes_S=[0, 0],
        transient_bytes_RO=[[0, 0]],
        in_flight_S=(1, 1),
        memory_limit_bytes_D=[10_000_000_000 + spare_bytes],
        num_microbatches=1,
        min_layers_per_stage=1,
    )
    claim = milp.solve(problem, time_limit_s=60.0)
    outcome = LAYOUT.checked(problem, claim, method="milp", solve_s=0.0)
    assert outcome.status is Status.OPTIMAL
    assert outcome.objective == pytest.approx(step_s)
