import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.placement.balance import check, eplb, local_search
from solvers.placement.balance.bound import bound, certificates
from solvers.placement.balance.problem import BalanceProblem, Robust
from solvers.placement.ranks import Placement, Ranks
from solvers.registry import BALANCE
from tests.expect import present
from tests.solvers.placement.balance.testing import even_weights, families, gap_ratio

LONG_S = 60.0
"""Never reached: the steps end the search."""


def problem_of(
    *, num_families: int, ranks: Ranks, layers: int = 2, experts: int = 64, seed: int = 0
) -> BalanceProblem:
    rng = np.random.default_rng(seed)
    return BalanceProblem(
        load_WLE=families(rng, num_families=num_families, num_layers=layers, num_experts=experts),
        weight_W=even_weights(num_families),
        ranks=ranks,
    )


def ruled(problem: BalanceProblem) -> Placement:
    return present(eplb.solve(problem, time_limit_s=LONG_S).solution)


@pytest.mark.parametrize(("ranks", "slots"), [(8, 9), (18, 4), (16, 5)])
def test_one_workload_is_spread_nearly_perfectly(ranks: int, slots: int) -> None:
    problem = problem_of(num_families=1, ranks=Ranks.uniform(ranks=ranks, slots_per_rank=slots))
    actual = local_search.search(problem, time_limit_s=LONG_S, most_steps=1500)
    assert gap_ratio(problem, actual) <= 0.004
    assert gap_ratio(problem, actual) <= 0.4 * gap_ratio(problem, ruled(problem))


def test_several_workloads_are_spread_at_once() -> None:
    problem = problem_of(num_families=4, ranks=Ranks.uniform(ranks=8, slots_per_rank=9))
    actual = local_search.search(problem, time_limit_s=LONG_S, most_steps=1500)
    assert gap_ratio(problem, actual) <= 0.2 * gap_ratio(problem, ruled(problem))


def test_an_unseen_family_is_spread_better_than_by_the_rule() -> None:
    everything = problem_of(num_families=5, ranks=Ranks.uniform(ranks=8, slots_per_rank=9))
    ratios = []
    for fold in range(5):
        known = [family for family in range(5) if family != fold]
        seen, unseen = (
            dataclasses.replace(
                everything,
                load_WLE=everything.load_WLE[chosen].copy(),
                weight_W=even_weights(len(chosen)),
            )
            for chosen in (known, [fold])
        )
        actual = local_search.search(seen, time_limit_s=LONG_S, most_steps=600)
        ratios.append(check.objective(unseen, actual) / check.objective(unseen, ruled(seen)))
    assert np.mean(ratios) < 0.97
    assert max(ratios) <= 1.01


def test_the_number_of_threads_changes_nothing() -> None:
    problem = problem_of(num_families=2, ranks=Ranks.uniform(ranks=8, slots_per_rank=9), layers=5)
    one, two = (
        local_search.search(problem, time_limit_s=LONG_S, threads=threads, most_steps=400)
        for threads in (1, 2)
    )
    assert (one.expert_LS == two.expert_LS).all()


def test_layers_in_turns_are_layers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(num_families=2, ranks=Ranks.uniform(ranks=8, slots_per_rank=9), layers=5)
    at_once = local_search.search(problem, time_limit_s=LONG_S, most_steps=400)
    monkeypatch.setattr(local_search, "MOST_CELLS", 1)
    in_turns = local_search.search(problem, time_limit_s=LONG_S, most_steps=400)
    assert (at_once.expert_LS == in_turns.expert_LS).all()


@pytest.mark.parametrize("robust", [Robust.WORST, Robust.CVAR])
def test_the_objective_named_is_the_one_that_is_small(robust: Robust) -> None:
    # One load of the four is steep: the mean hardly sees it, the worst case sees nothing else.
    problem = problem_of(num_families=4, ranks=Ranks.uniform(ranks=16, slots_per_rank=5))
    load_WLE = problem.load_WLE.copy()
    load_WLE[3] = load_WLE[3] ** 2
    weight_W = np.array([0.32, 0.32, 0.32, 0.04])
    mean = dataclasses.replace(problem, load_WLE=load_WLE, weight_W=weight_W)
    robust_problem = dataclasses.replace(mean, robust=robust, tail_ratio=0.2)
    by_mean, by_robust = (
        local_search.search(stated, time_limit_s=LONG_S, most_steps=1200)
        for stated in (mean, robust_problem)
    )
    assert check.objective(robust_problem, by_robust) < check.objective(robust_problem, by_mean)


def test_a_faster_rank_gets_more_to_do() -> None:
    speed_G = np.array([1.0, 1.0, 2.0, 1.0])
    ranks = Ranks(
        slots_G=np.array([20, 20, 24, 8]), node_G=np.zeros(4, dtype=np.int64), speed_G=speed_G
    )
    problem = problem_of(num_families=1, ranks=ranks)
    actual = local_search.search(problem, time_limit_s=LONG_S, most_steps=800)
    work_G = check.launch_times(problem, actual).mean(axis=0)[0].mean(axis=0) * speed_G
    assert work_G[2] > 1.5 * work_G[[0, 1]].mean()
    assert gap_ratio(problem, actual) < 0.05


def test_the_weights_that_are_read_count() -> None:
    # Ten loads of mean 1 cost the rank 0.63 active loads each: even by load is not even by time.
    plain = problem_of(num_families=1, ranks=Ranks.uniform(ranks=8, slots_per_rank=9), seed=3)
    costly = dataclasses.replace(plain, active_load=3.0)
    by_load, by_time = (
        local_search.search(stated, time_limit_s=LONG_S, most_steps=800)
        for stated in (plain, costly)
    )
    assert check.objective(costly, by_time) < check.objective(costly, by_load)


def test_no_rank_holds_an_expert_twice() -> None:
    problem = problem_of(num_families=2, ranks=Ranks.uniform(ranks=8, slots_per_rank=9))
    actual = local_search.search(problem, time_limit_s=LONG_S, most_steps=300)
    for row in actual.expert_LS.reshape(-1, 9):
        assert len(set(row.tolist())) == 9


def test_a_start_is_never_made_worse() -> None:
    problem = problem_of(num_families=1, ranks=Ranks.uniform(ranks=8, slots_per_rank=9))
    start = ruled(problem)
    actual = local_search.search(problem, time_limit_s=LONG_S, most_steps=200, start=start)
    assert check.objective(problem, actual) <= check.objective(problem, start)


def test_the_time_limit_ends_the_search() -> None:
    problem = problem_of(num_families=3, ranks=Ranks.uniform(ranks=8, slots_per_rank=9))
    assert BALANCE.solve(problem, method="local_search", time_limit_s=1e-6).status.has_solution


@settings(deadline=None, max_examples=15, derandomize=True)
@given(seed=st.integers(0, 10_000))
def test_the_layers_add_up(seed: int) -> None:
    problem = problem_of(
        num_families=3, ranks=Ranks.uniform(ranks=4, slots_per_rank=5), experts=16, seed=seed
    )
    placement = ruled(problem)
    value_L, bound_L = certificates(problem, placement)
    assert value_L.sum() == pytest.approx(check.objective(problem, placement))
    assert bound_L.sum() == pytest.approx(bound(problem))
    assert (value_L >= bound_L).all()
