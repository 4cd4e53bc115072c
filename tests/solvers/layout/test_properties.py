"""What must hold for any instance, whatever the numbers."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.layout.problem import Layout, LayoutProblem
from solvers.layout.relax import with_extra_memory
from solvers.registry import LAYOUT
from solvers.result import Outcome, Status
from tests.solvers.layout.testing import tiny_problem

few_examples = settings(deadline=None, max_examples=40, derandomize=True)


def solved(problem: LayoutProblem) -> Outcome[Layout]:
    return LAYOUT.solve(problem, time_limit_s=60.0)


seeds = st.integers(min_value=10_000, max_value=20_000)


@few_examples
@given(seed=seeds, extra_bytes=st.integers(min_value=1, max_value=50))
def test_more_memory_never_hurts(seed: int, extra_bytes: int) -> None:
    problem = tiny_problem(np.random.default_rng(seed))
    roomier = with_extra_memory(problem, extra_bytes=extra_bytes)
    assert solved(roomier).objective <= solved(problem).objective * (1 + 1e-6)


@few_examples
@given(seed=seeds)
def test_the_order_of_the_options_changes_nothing(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = tiny_problem(rng)
    order = rng.permutation(problem.num_options)
    shuffled = dataclasses.replace(
        problem,
        options=tuple(problem.options[option] for option in order),
        time_s_RO=problem.time_s_RO[:, order],
        saved_bytes_RO=problem.saved_bytes_RO[:, order],
        transient_bytes_RO=problem.transient_bytes_RO[:, order],
    )
    assert solved(shuffled).objective == pytest.approx(solved(problem).objective, rel=1e-6)


@few_examples
@given(seed=seeds, factor=st.sampled_from([1e-6, 0.5, 3.0, 1e7]))
def test_scaling_the_times_scales_the_objective(seed: int, factor: float) -> None:
    problem = tiny_problem(np.random.default_rng(seed))
    scaled = dataclasses.replace(
        problem,
        time_s_RO=problem.time_s_RO * factor,
        fixed_time_s_S=problem.fixed_time_s_S * factor,
    )
    outcome, reference = solved(scaled), solved(problem)
    assert outcome.status is reference.status
    assert outcome.objective == pytest.approx(reference.objective * factor, rel=1e-6)


@few_examples
@given(seed=seeds)
def test_the_bound_never_passes_the_objective(seed: int) -> None:
    outcome = solved(tiny_problem(np.random.default_rng(seed)))
    assert outcome.bound <= outcome.objective
    assert (outcome.status is Status.INFEASIBLE) == (outcome.bound == np.inf)


@few_examples
@given(seed=seeds)
def test_forcing_one_option_everywhere_never_helps(seed: int) -> None:
    problem = tiny_problem(np.random.default_rng(seed))
    uniform = dataclasses.replace(problem, uniform_option=True)
    free = dataclasses.replace(problem, uniform_option=False)
    assert solved(free).objective <= solved(uniform).objective * (1 + 1e-6)
