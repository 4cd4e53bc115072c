import numpy as np

from solvers.layout import check
from solvers.layout.problem import LayoutProblem
from solvers.layout.relax import least_extra_bytes, with_extra_memory
from solvers.registry import LAYOUT
from solvers.result import Status
from tests.solvers.layout import brute_force
from tests.solvers.layout.testing import (
    interleaved_problem,
    large_problem,
    tiny_problem,
    two_stages,
)


def least_overflow(problem: LayoutProblem) -> int:
    """By trying everything."""
    roomy = with_extra_memory(problem, extra_bytes=10**9)
    limits = [int(limit) for limit in problem.memory_limit_bytes_D]
    overflows = [
        max(
            needed - limit
            for needed, limit in zip(check.memory_bytes_D(problem, layout), limits, strict=True)
        )
        for layout in brute_force.layouts(problem)
        if not check.violations(roomy, layout)
    ]
    return max(0, min(overflows))


def test_finds_the_least_addition_that_exists() -> None:
    for seed in range(500, 540):
        problem = tiny_problem(np.random.default_rng(seed))
        actual, least = least_extra_bytes(problem, time_limit_s=60.0), least_overflow(problem)
        assert actual == least, (seed, actual, least)


def test_names_the_bytes() -> None:
    # Everything lean and the cuts fixed: device 0 needs 5 + 20 + 2 * (3 + 2) + 4 = 39 bytes,
    # device 1 needs 7 + 40 + 4 + 9 = 60, and 47 + 32 = 79 under the fast option.
    problem = two_stages(fixed_layout=(2, 2), memory_limit_bytes_D=[100, 48])
    assert least_extra_bytes(problem, time_limit_s=1.0) == 12
    relaxed = with_extra_memory(problem, extra_bytes=12)
    assert LAYOUT.solve(relaxed, time_limit_s=1.0).status is Status.OPTIMAL
    one_less = with_extra_memory(problem, extra_bytes=11)
    assert LAYOUT.solve(one_less, time_limit_s=1.0).status is Status.INFEASIBLE


def test_a_problem_with_a_solution_needs_nothing() -> None:
    assert least_extra_bytes(large_problem(), time_limit_s=1.0) == 0
    assert least_extra_bytes(interleaved_problem(), time_limit_s=1.0) == 0


def test_out_of_time_a_layout_fits_with_some_addition() -> None:
    tight = with_extra_memory(interleaved_problem(), extra_bytes=-45_000_000_000)
    assert least_extra_bytes(tight, time_limit_s=0.5) > 0
