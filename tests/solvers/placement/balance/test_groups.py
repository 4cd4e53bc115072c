"""Replicas on whole groups of nodes: what is left for static dispatch to draw."""

import dataclasses

import numpy as np

from solvers.placement.balance.check import objective, violations
from solvers.placement.balance.eplb import eplb
from solvers.placement.balance.groups import group_start, layout_of
from solvers.placement.balance.local_search import search
from solvers.placement.balance.objective import planning_loads
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.balance.starts import search_near
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.nearest import expected_split
from solvers.placement.ranks import Placement, Ranks
from tests.solvers.placement.dispatch.static import split

SHAPES = ((4, 4, 3, 8), (32, 8, 9, 256), (64, 8, 5, 256), (72, 8, 4, 256), (12, 4, 5, 48))
"""Ranks, of a node, slots of each, experts."""


def problem_of(ranks: int, per_node: int, slots: int, experts: int) -> BalanceProblem:
    rng = np.random.default_rng(ranks)
    return BalanceProblem(
        load_WLE=rng.lognormal(0.0, 0.9, (1, 2, experts)),
        weight_W=np.ones(1),
        ranks=Ranks(
            slots_G=np.full(ranks, slots),
            node_G=np.arange(ranks) // per_node,
            speed_G=np.ones(ranks),
        ),
        dispatch=ReplicaDispatch.STATIC,
    )


def case_of(problem: BalanceProblem, placement: Placement, *, seed: int) -> DispatchCase:
    return DispatchCase(
        load_PLE=problem.load_WLE, placement=placement, ranks=problem.ranks, seed=seed
    )


def test_the_engine_s_deals_give_each_replica_next_to_as_many_ranks_whatever_the_seed() -> None:
    wrong, fitting = [], 0
    for shape in SHAPES:
        problem = problem_of(*shape)
        begin = group_start(problem)
        if begin is None:
            continue
        fitting += 1
        start, domain_LGE = begin
        placed = search(
            dataclasses.replace(problem, dispatch=ReplicaDispatch.NEAR),
            time_limit_s=0.3,
            start=start,
            domain_LGE=domain_LGE,
        )
        layer_L1 = np.arange(2)[:, None]
        if (
            violations(problem, placed)
            or not domain_LGE[layer_L1, problem.ranks.rank_S[None], placed.expert_LS].all()
        ):
            wrong.append((shape, "outside of what is allowed"))
        if (placed.copies_LE(shape[3]) != start.copies_LE(shape[3])).any():
            wrong.append((shape, "other numbers of copies"))
        expected_LEG = expected_split(case_of(problem, placed, seed=0))
        for seed in (42, 7):
            dealt_LEG = split(case_of(problem, placed, seed=seed))
            # By one source rank at most.
            if np.abs(dealt_LEG - expected_LEG).max() >= 1.0 / problem.ranks.num_ranks:
                wrong.append((shape, f"dealt unevenly with seed {seed}"))
    assert not wrong
    assert fitting >= 4


def test_slots_come_out_even_or_there_is_no_layout() -> None:
    shapes = (*SHAPES, (16, 8, 5, 64), (8, 8, 9, 64), (40, 8, 7, 256))
    actual = {}
    for shape in shapes:
        problem = problem_of(*shape)
        layout = layout_of(problem)
        actual[shape] = layout is not None
        if layout is None:
            continue
        used = layout.everywhere * (sum(layout.sizes) - 1) + sum(
            number * (size - 1) for number, size in zip(layout.on_group, layout.sizes, strict=True)
        )
        assert used == problem.ranks.num_slots - problem.num_experts, shape
    # Two and three nodes have no two groups of several. On one node of 8 ranks an expert takes 3
    # slots on a group and 7 everywhere: neither fills 8.
    assert {shape for shape, has_layout in actual.items() if not has_layout} == {
        (12, 4, 5, 48),
        (16, 8, 5, 64),
        (8, 8, 9, 64),
    }


def test_on_four_ranks_of_one_node_pairs_of_ranks_are_found() -> None:
    problem = problem_of(4, 4, 3, 8)
    placed = search_near(problem, time_limit_s=0.6)
    values = [objective(problem, placed, seed=seed) for seed in range(4)]
    assert max(values) - min(values) < 1e-9
    by_rule = eplb(planning_loads(problem), ranks=problem.ranks)
    assert values[0] < objective(problem, by_rule)
