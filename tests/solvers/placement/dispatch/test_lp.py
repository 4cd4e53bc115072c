from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.placement.dispatch import lp
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.lp_glop import flattest_loads
from solvers.placement.dispatch.registry import rank_loads
from solvers.placement.ranks import Placement, Ranks
from tests.solvers.placement.dispatch.testing import sample_case


def _least_level(case: DispatchCase, *, of_pass: int, layer: int) -> float:
    """Return the best largest load over speed by its dual, over every set of ranks."""
    ranks = case.ranks.num_ranks
    hosts_EG = case.copies_LEG[layer] > 0
    best = 0.0
    for size in range(1, ranks + 1):
        for chosen in combinations(range(ranks), size):
            outside = np.setdiff1d(np.arange(ranks), chosen)
            confined = ~hosts_EG[:, outside].any(axis=1)
            load = case.load_PLE[of_pass, layer, confined].sum()
            best = max(best, float(load / case.ranks.speed_G[list(chosen)].sum()))
    return best


def _uneven_case(seed: int) -> DispatchCase:
    """Any placement at all: unequal slots and speeds, many replicas, also twins on a rank."""
    rng = np.random.default_rng(seed)
    ranks = Ranks(
        slots_G=rng.integers(1, 5, 5),
        node_G=np.zeros(5, dtype=np.int64),
        speed_G=rng.uniform(0.5, 2.0, 5),
    )
    experts = int(rng.integers(1, min(ranks.num_slots, 6) + 1))
    rows = [
        rng.permutation(
            np.concatenate(
                (np.arange(experts), rng.integers(0, experts, ranks.num_slots - experts))
            )
        )
        for _ in range(3)
    ]
    return DispatchCase(
        load_PLE=rng.poisson(rng.uniform(0.0, 60.0), (4, 3, experts)).astype(np.float64),
        placement=Placement(expert_LS=np.array(rows)),
        ranks=ranks,
    )


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 100_000), sweeps=st.sampled_from((0, lp.SWEEPS)))
def test_the_largest_load_is_the_best_that_any_set_of_ranks_allows(seed: int, sweeps: int) -> None:
    """With 0 sweeps the linear program answers alone."""
    case = _uneven_case(seed)
    levels_PL = (lp.rank_loads(case, sweeps=sweeps) / case.ranks.speed_G).max(axis=2)
    for of_pass, layer in ((0, 0), (1, 1), (3, 2)):
        assert levels_PL[of_pass, layer] == pytest.approx(
            _least_level(case, of_pass=of_pass, layer=layer), rel=2e-6, abs=1e-9
        )


def test_a_chain_that_pours_slowly_is_left_to_the_linear_program() -> None:
    # Expert e is on ranks e and e + 1 and has 12 tokens: 11 experts, 12 ranks. Rank 0 can only
    # take from expert 0, so that all ranks at 11 needs a little passed on along the whole chain.
    slots = np.array([1, *(2,) * 10, 1])
    case = DispatchCase(
        load_PLE=np.full((1, 1, 11), 12.0),
        placement=Placement(expert_LS=np.repeat(np.arange(11), 2)[None, :]),
        ranks=Ranks(slots_G=slots, node_G=np.zeros(12, dtype=np.int64), speed_G=np.ones(12)),
    )
    assert lp.rank_loads(case, sweeps=5).ravel() == pytest.approx(np.full(12, 11.0))
    assert lp.rank_loads(case).max() == pytest.approx(11.0, rel=2e-6)


def test_batches_of_passes_change_nothing() -> None:
    ranks = Ranks.uniform(ranks=4, slots_per_rank=3)
    case = sample_case(passes=lp.BATCH_PASSES + 3, layers=2, experts=8, ranks=ranks, seed=5)
    whole = rank_loads("lp", case)
    last = DispatchCase(
        load_PLE=np.array(case.load_PLE[-3:]), placement=case.placement, ranks=ranks
    )
    np.testing.assert_allclose(
        whole[-3:].max(axis=2), rank_loads("lp", last).max(axis=2), rtol=2e-6
    )


def test_the_linear_program_by_hand() -> None:
    # Ranks hold 4 and 0 already and share 2: the second takes both, the level is 4.
    loads = flattest_loads(
        fixed_G=np.array([4.0, 0.0]),
        speed_G=np.ones(2),
        amounts_K=np.array([2.0]),
        hosts_K=(np.array([0, 1]),),
    )
    assert loads == pytest.approx([4.0, 2.0])
    # Twice as fast, the first may take all.
    loads = flattest_loads(
        fixed_G=np.array([0.0, 0.0]),
        speed_G=np.array([2.0, 1.0]),
        amounts_K=np.array([6.0]),
        hosts_K=(np.array([0, 1]),),
    )
    assert loads == pytest.approx([4.0, 2.0])
