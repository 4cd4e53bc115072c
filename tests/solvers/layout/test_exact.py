from solvers.layout import exact
from solvers.registry import LAYOUT
from solvers.result import Status
from tests.expect import present
from tests.solvers.layout.testing import large_problem


def test_out_of_time_it_keeps_an_honest_bound() -> None:
    claim = exact.solve(large_problem(), time_limit_s=0.0)
    outcome = LAYOUT.checked(large_problem(), claim, method="exact", solve_s=0.0)
    proven = exact.solve(large_problem(), time_limit_s=60.0)
    assert outcome.status is Status.FEASIBLE
    assert outcome.bound < proven.bound <= outcome.objective


def test_one_stage_is_the_fastest_option_that_fits() -> None:
    # 61 layers on one device of 1 TB: 579.5 GB static, and what 61 layers keep for one micro-batch.
    problem = large_problem(
        device_of_stage=(0,),
        fixed_time_s_S=[0.0],
        fixed_bytes_S=[0],
        fixed_saved_bytes_S=[0],
        in_flight_S=(1,),
        memory_limit_bytes_D=[620_000_000_000],
        num_microbatches=4,
    )
    claim = exact.solve(problem, time_limit_s=60.0)
    # none keeps 94.6 GB and does not fit; selective keeps 42.6 GB; 560 + 42.6 + 1 fits.
    assert present(claim.solution).layers_SR == ((3, 58),)
    assert problem.options[present(claim.solution).option_S[0]] == "selective/c1"
