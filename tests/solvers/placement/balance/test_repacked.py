"""Experts moved under a known table of static dispatch, which stays as it is."""

import dataclasses

import numpy as np
import pytest

from solvers.placement.balance.check import violations
from solvers.placement.balance.eplb import eplb
from solvers.placement.balance.objective import planning_loads, value_of
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.balance.repacked import repacked, search_on_table
from solvers.placement.balance.starts import start_placement
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.static import Streams, layer_targets, rank_loads, split, targets
from solvers.placement.ranks import Floats, Placement, Ranks

SHAPES = ((16, 4, 5, 64), (18, 6, 4, 64), (8, 8, 9, 64), (12, 6, 3, 32))
"""Ranks, of a node, slots of each, experts."""
SEED = 42


def problem_of(seed: int, ranks: int, per_node: int, slots: int, experts: int) -> BalanceProblem:
    rng = np.random.default_rng(seed)
    return BalanceProblem(
        load_WLE=rng.lognormal(0.0, 1.1, (1, 3, experts)),
        weight_W=np.ones(1),
        ranks=Ranks.uniform(ranks=ranks, slots_per_rank=slots, ranks_per_node=per_node),
        dispatch=ReplicaDispatch.STATIC,
    )


def case_of(problem: BalanceProblem, placement: Placement) -> DispatchCase:
    return DispatchCase(
        load_PLE=problem.load_WLE, placement=placement, ranks=problem.ranks, seed=SEED
    )


def largest(problem: BalanceProblem, placement: Placement) -> float:
    return value_of(problem, rank_loads(case_of(problem, placement)).max(axis=2))


def on_nodes(split_LEG: Floats, ranks: Ranks) -> Floats:
    actual = np.zeros((*split_LEG.shape[:2], ranks.num_nodes))
    for rank, node in enumerate(ranks.node_G.tolist()):
        actual[:, :, node] += split_LEG[:, :, rank]
    return actual


def test_replicas_keep_what_the_table_assigns_them_and_no_layer_gets_less_even() -> None:
    wrong, even = [], []
    for seed, shape in enumerate(SHAPES):
        problem = problem_of(seed, *shape)
        for before in (
            eplb(planning_loads(problem), ranks=problem.ranks),
            start_placement(problem, ceiling=0.0),
        ):
            table_LEG = split(case_of(problem, before))
            after = repacked(problem, before, table_LEG, time_limit_s=9.0, most_steps=200)
            moved_LEG = split(case_of(problem, after))
            several_LE = before.copies_LE(problem.num_experts) > 1
            if (
                violations(problem, after)
                or (after.copies_LE(problem.num_experts) > 1)[~several_LE].any()
                or not np.allclose(
                    on_nodes(table_LEG, problem.ranks)[several_LE],
                    on_nodes(moved_LEG, problem.ranks)[several_LE],
                )
                or largest(problem, after) > largest(problem, before) + 1e-9
            ):
                wrong.append((shape, largest(problem, before), largest(problem, after)))
            even.append((largest(problem, after) - 1.0) / (largest(problem, before) - 1.0))
    assert not wrong
    # Experts of one replica fill what the draws leave uneven.
    assert np.median(even) < 0.5


def test_a_placement_for_a_known_seed_is_better_under_it_than_all_it_was_made_from() -> None:
    off = []
    for seed, shape in enumerate(SHAPES[:2]):
        problem = problem_of(10 + seed, *shape)
        bases = [
            eplb(planning_loads(problem), ranks=problem.ranks),
            start_placement(problem, ceiling=None),
        ]
        actual = search_on_table(problem, bases, seed=SEED, time_limit_s=1.0)
        best = min(largest(problem, base) for base in bases)
        if violations(problem, actual) or largest(problem, actual) - 1.0 > 0.5 * (best - 1.0):
            off.append((shape, best, largest(problem, actual)))
    assert not off


def test_a_base_stays_where_there_is_no_time_to_find_better() -> None:
    problem = problem_of(3, *SHAPES[0])
    base = eplb(planning_loads(problem), ranks=problem.ranks)
    actual = search_on_table(problem, [base], seed=SEED, time_limit_s=0.0)
    assert not violations(problem, actual)
    assert largest(problem, actual) <= largest(problem, base) + 1e-9


def test_deviations_are_those_of_slots_and_raise_what_a_table_is_worth() -> None:
    problem = problem_of(4, *SHAPES[0])
    rng = np.random.default_rng(0)
    scatter_BWLE = 0.05 * problem.load_WLE * rng.standard_normal((20, *problem.load_WLE.shape))
    scattered = dataclasses.replace(problem, scatter_BWLE=scatter_BWLE)
    base = eplb(planning_loads(problem), ranks=problem.ranks)
    table_LEG = split(case_of(problem, base))
    actual = repacked(scattered, base, table_LEG, time_limit_s=9.0, most_steps=200)
    assert not violations(problem, actual)
    assert largest(problem, actual) < largest(problem, base)


def test_streams_that_are_copied_go_on_as_they_would_have() -> None:
    problem = problem_of(5, *SHAPES[0])
    base = eplb(planning_loads(problem), ranks=problem.ranks)
    streams, actual = Streams(SEED, num_ranks=problem.ranks.num_ranks), []
    for layer, expert_S in enumerate(base.expert_LS):
        # What a copy draws leaves the streams where they are.
        list(layer_targets(expert_S, ranks=problem.ranks, streams=streams.copy()))
        drawn = layer_targets(expert_S, ranks=problem.ranks, streams=streams)
        actual += [(layer, expert, target_H.tolist()) for expert, target_H in drawn]
    assert actual == [
        (layer, expert, target_H.tolist())
        for layer, expert, target_H in targets(case_of(problem, base))
    ]


def test_deviations_of_another_shape_or_none_are_refused() -> None:
    for wrong in (
        np.ones((2, 3)),
        np.full((1, 1, 3, 64), np.nan),
    ):
        with pytest.raises(ValueError, match="deviations have shape"):
            dataclasses.replace(problem_of(6, *SHAPES[0]), scatter_BWLE=wrong)
