"""Loads that other passes will not have exactly: what searches for near replicas see of that."""

import dataclasses

import numpy as np
import pytest

from solvers.placement.balance import check
from solvers.placement.balance.eplb import eplb
from solvers.placement.balance.objective import largest_times, planning_loads
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.balance.starts import drawn_loads, drawn_times
from solvers.placement.ranks import Ranks
from tests.solvers.placement.balance.testing import families


def problem_of(
    *, dispatch: ReplicaDispatch = ReplicaDispatch.NEAR, dispersion: float = 0.05
) -> BalanceProblem:
    rng = np.random.default_rng(6)
    load_WLE = families(rng, num_families=1, num_layers=3, num_experts=64)
    return BalanceProblem(
        load_WLE=load_WLE,
        weight_W=np.ones(1),
        ranks=Ranks.uniform(ranks=16, slots_per_rank=5, ranks_per_node=4),
        dispatch=dispatch,
        variance_WLE=dispersion * load_WLE,
    )


def test_the_guess_and_the_draws_agree_on_what_scatter_costs_and_the_objective_leaves_it_out() -> (
    None
):
    off = []
    for dispatch in (ReplicaDispatch.NEAR, ReplicaDispatch.STATIC):
        problem = problem_of(dispatch=dispatch)
        known = dataclasses.replace(problem, variance_WLE=None)
        placement = eplb(planning_loads(problem), ranks=problem.ranks)
        guess = largest_times(problem, placement.expert_LS).sum()
        drawn = drawn_times(problem, placement, draws=200).sum()
        still = drawn_times(known, placement, draws=200).sum()
        if abs(guess / drawn - 1.0) > 0.03 or drawn < 1.01 * still:
            off.append((dispatch, guess, drawn, still))
        assert check.objective(problem, placement) == check.objective(known, placement)
    assert not off


def test_drawn_loads_have_the_mean_and_the_variance_that_the_problem_says() -> None:
    problem = problem_of(dispersion=0.01)
    load_DWLE = drawn_loads(problem, 4000, seed=1)
    assert problem.variance_WLE is not None
    np.testing.assert_allclose(load_DWLE.mean(axis=0), problem.load_WLE, rtol=0.02)
    np.testing.assert_allclose(load_DWLE.var(axis=0), problem.variance_WLE, rtol=0.2)
    assert (drawn_loads(problem_of(dispersion=9.0), 10, seed=1) >= 0.0).all()


def test_variances_that_are_none_are_refused() -> None:
    problem = problem_of()
    assert problem.variance_WLE is not None
    for wrong, said in (
        (problem.variance_WLE[:, :, 1:].copy(), "expected"),
        (-problem.variance_WLE, "non-negative"),
        (np.full_like(problem.variance_WLE, np.nan), "non-negative"),
    ):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(problem, variance_WLE=wrong)
