from dataclasses import replace

import numpy as np
import pytest

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.ranks import Placement, Ranks
from tests.solvers.placement.dispatch.testing import rank_loads, sample_case

RANKS = Ranks.uniform(ranks=4, slots_per_rank=2)


def test_loads_scatter_around_the_even_split_as_a_multinomial() -> None:
    # One expert on four ranks, 400 tokens: mean 100, variance 400 * 1/4 * 3/4 = 75.
    case = DispatchCase(
        load_PLE=np.full((4000, 1, 1), 400.0),
        placement=Placement(expert_LS=np.zeros((1, 4), dtype=np.int64)),
        ranks=Ranks.uniform(ranks=4, slots_per_rank=1),
        seed=7,
    )
    loads = rank_loads("dynamic", case)[:, 0]
    # The mean of 4000 draws has a standard error of 0.14, the variance one of 1.7.
    assert np.abs(loads.mean(axis=0) - 100.0).max() < 0.7
    assert np.abs(loads.var(axis=0) - 75.0).max() < 8.5
    assert (loads.sum(axis=1) == 400.0).all()


def test_equal_seeds_draw_the_same_and_others_do_not() -> None:
    case = sample_case(passes=3, layers=2, experts=6, ranks=RANKS, seed=1)
    first = rank_loads("dynamic", case)
    assert np.array_equal(first, rank_loads("dynamic", case))
    assert not np.array_equal(first, rank_loads("dynamic", replace(case, seed=2)))


def test_parts_of_tokens_are_refused() -> None:
    case = sample_case(passes=1, layers=1, experts=6, ranks=RANKS, seed=1)
    with pytest.raises(ValueError, match="whole tokens"):
        rank_loads("dynamic", replace(case, load_PLE=case.load_PLE + 0.5))
