from dataclasses import replace

import numpy as np

from solvers.placement.dispatch.case import DispatchCase, split_loads
from solvers.placement.dispatch.launches import FAR, nearest_H
from solvers.placement.dispatch.sampling import expected_split
from solvers.placement.ranks import Placement, Ranks
from tests.rows import each_row
from tests.solvers.placement.dispatch.static import rank_loads, targets
from tests.solvers.placement.dispatch.testing import sample_case

RANKS = Ranks.uniform(ranks=6, slots_per_rank=1, ranks_per_node=2)


def one_expert(slots: int, ranks: Ranks, *, seed: int = 0, layers: int = 1) -> DispatchCase:
    """Expert 0 in the first slots, the others hold one expert each."""
    row = np.concatenate((np.zeros(slots), np.arange(1, ranks.num_slots - slots + 1)))
    return DispatchCase(
        load_PLE=np.ones((1, layers, ranks.num_slots - slots + 1)),
        placement=Placement(expert_LS=np.tile(row.astype(np.int64), (layers, 1))),
        ranks=ranks,
        seed=seed,
    )


@each_row(
    ("hosts", "ranks", "near"),
    [
        # Own rank, then own node, then none: nodes {0, 1}, {2, 3}, {4, 5}.
        ([0, 3], RANKS, [0, 0, 1, 1, FAR, FAR]),
        # The first replica of a node serves it.
        (
            [1, 2, 5],
            Ranks.uniform(ranks=8, slots_per_rank=1, ranks_per_node=4),
            [0, 0, 1, 0, 2, 2, 2, 2],
        ),
        # Replicas that are all on one node are near to their ranks only.
        ([0, 1], RANKS, [0, 1, FAR, FAR, FAR, FAR]),
    ],
)
def test_replicas_on_these_ranks_are_near_to_those(
    hosts: list[int], ranks: Ranks, near: list[int]
) -> None:
    assert nearest_H(np.array(hosts), ranks=ranks).tolist() == near


def test_near_replicas_are_those_of_the_plain_definition() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        per_node = int(rng.choice([1, 2, 4, 8]))
        ranks = Ranks.uniform(ranks=8, slots_per_rank=2, ranks_per_node=per_node)
        hosts = np.sort(rng.integers(0, 8, size=int(rng.integers(1, 6))))
        nodes = hosts // per_node
        for source, near in enumerate(nearest_H(hosts, ranks=ranks)):
            own = np.flatnonzero(hosts == source)
            beside = np.flatnonzero(nodes == source // per_node)
            if len(hosts) == 1:
                assert near == 0
            elif len(own):
                assert near == own[0]
            elif 0 < len(beside) < len(hosts):
                assert near == beside[0]
            else:
                assert near == FAR


def test_far_sources_of_one_stream_are_dealt_fairly() -> None:
    # Two replicas on the only node: 2 near sources, 18 far ones that have drawn for nothing else.
    ranks = Ranks.uniform(ranks=20, slots_per_rank=1)
    for seed in range(8):
        ((_, _, target_H),) = targets(one_expert(2, ranks, seed=seed))
        assert target_H[:2].tolist() == [0, 1]
        assert np.bincount(target_H, minlength=20).tolist() == [10, 10, *[0] * 18]


def test_ranks_that_drew_for_other_experts_get_separate_assignments() -> None:
    # Expert 0 is near to ranks 0 and 1, which so skip a draw that ranks 2 to 9 make; expert 1 is
    # near to ranks 2 and 3. Of its eight far hands only those of one stream must be even.
    ranks = Ranks.uniform(ranks=10, slots_per_rank=1)
    expert_LS = np.array([[0, 0, 1, 1, 2, 3, 4, 5, 6, 7]])
    counts = set()
    for seed in range(40):
        case = DispatchCase(
            load_PLE=np.ones((1, 1, 8)),
            placement=Placement(expert_LS=expert_LS),
            ranks=ranks,
            seed=seed,
        )
        first, second = (target_H for _, _, target_H in targets(case))
        assert np.bincount(first)[:2].tolist() == [5, 5]
        counts.add(int((second == 2).sum()))
    assert counts >= {4, 5, 6}


def test_draws_vary_about_the_expected_load() -> None:
    for ranks_per_node in (4, 16):
        ranks = Ranks.uniform(ranks=16, slots_per_rank=5, ranks_per_node=ranks_per_node)
        case = sample_case(passes=1, layers=3, experts=64, ranks=ranks, seed=3)
        expected = split_loads(case, expected_split(case))
        drawn = np.stack([rank_loads(replace(case, seed=seed)) for seed in range(64)])
        np.testing.assert_allclose(expected.sum(), case.load_PLE.sum())
        error = np.abs(drawn.mean(axis=0) - expected) / np.maximum(drawn.std(axis=0), 1e-9)
        # Standard errors of a mean of 64 draws: 48 of them, the largest of which stays below 4.
        assert (error * 8.0)[drawn.std(axis=0) > 0.0].max() < 4.0
        np.testing.assert_allclose(
            drawn[:, drawn.std(axis=0) < 1e-9][0], expected[drawn.std(axis=0) < 1e-9]
        )
