from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.sampling import expected_loads
from solvers.placement.ranks import Placement, Ranks


def _least_level(case: DispatchCase, *, of_pass: int, layer: int) -> float:
    """Return the best largest load over speed by its dual, over every set of ranks."""
    ranks = case.ranks.num_ranks
    hosts_EG = case.copies_LEG[layer] > 0
    best = 0.0
    for size in range(1, ranks + 1):
        for chosen in combinations(range(ranks), size):
            confined = ~hosts_EG[:, np.setdiff1d(np.arange(ranks), chosen)].any(axis=1)
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
@given(seed=st.integers(0, 100_000))
def test_the_largest_load_is_the_best_that_any_set_of_ranks_allows(seed: int) -> None:
    case = _uneven_case(seed)
    levels_PL = (expected_loads("lp", case) / case.ranks.speed_G).max(axis=2)
    for of_pass, layer in ((0, 0), (1, 1), (3, 2)):
        assert levels_PL[of_pass, layer] == pytest.approx(
            _least_level(case, of_pass=of_pass, layer=layer), rel=2e-6, abs=1e-9
        )
