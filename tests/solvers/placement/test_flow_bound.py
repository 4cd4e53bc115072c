"""No grouping keeps more of a flow than the bounds say, all groupings tried."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.placement.flow_bound import (
    most_staying_by_matching,
    most_staying_by_spectrum,
    most_staying_cut_at,
)
from solvers.placement.ranks import Floats
from tests.solvers.placement.testing import all_assignments


def most_kept(flow_EE: Floats, slots_G: tuple[int, ...]) -> float:
    is_on_GXE = all_assignments(slots_G) == np.arange(len(slots_G))[:, None, None]
    return float(np.max(sum(on_XE @ flow_EE @ on_XE.T for on_XE in is_on_GXE.astype(np.float64))))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    slots_G=st.sampled_from([(2, 2), (1, 1, 1), (3, 3), (2, 2, 2), (4,)]),
    shape=st.sampled_from([0.1, 0.5, 5.0]),
    height=st.floats(0.0, 5.0),
)
def test_bounds_hold_for_any_flow(
    seed: int, slots_G: tuple[int, ...], shape: float, height: float
) -> None:
    count, groups = sum(slots_G), len(slots_G)
    drawn_EE = np.random.default_rng(seed).gamma(shape, size=(count, count))
    flow_EE = np.asarray(drawn_EE, dtype=np.float64)
    kept = most_kept(flow_EE, slots_G) * (1 - 1e-12)
    assert most_staying_by_matching(flow_EE, group_size=slots_G[0]) >= kept
    assert most_staying_by_spectrum(flow_EE, num_groups=groups) >= kept
    assert most_staying_cut_at(flow_EE, height, num_groups=groups) >= kept


def test_flow_along_a_diagonal_stays_whole_and_no_more() -> None:
    flow_EE = np.asarray(np.kron(np.eye(4), np.ones((2, 2))), dtype=np.float64)
    assert most_staying_by_matching(flow_EE, group_size=2) == pytest.approx(16.0)
    assert most_staying_by_spectrum(flow_EE, num_groups=4) == pytest.approx(16.0)


def test_an_even_flow_keeps_the_share_of_one_group() -> None:
    assert most_staying_by_spectrum(np.ones((6, 6)), num_groups=3) == pytest.approx(12.0, rel=1e-5)
    assert most_staying_by_matching(np.ones((6, 6)), group_size=2) == pytest.approx(12.0)


def test_cutting_beats_both_on_clusters_with_heavy_cells() -> None:
    rng = np.random.default_rng(0)
    flow_EE = rng.gamma(0.5, size=(64, 64)) * np.where(np.kron(np.eye(8), np.ones((8, 8))), 7, 1)
    cut = most_staying_cut_at(flow_EE, 6.0 * flow_EE.mean(), num_groups=2)
    assert cut < 0.9 * most_staying_by_matching(flow_EE, group_size=32)
    assert cut < 0.98 * most_staying_by_spectrum(flow_EE, num_groups=2)
