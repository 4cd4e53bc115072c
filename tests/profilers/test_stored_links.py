"""The stored profile of four emulated nodes: 1 Gbit/s and 1 ms, one node slowed to 200 Mbit/s."""

from pathlib import Path

import numpy as np
import pytest

from profilers.imports.link_matrix import read_link_matrix
from profilers.links.matrix import links_of
from profilers.store import read_profile
from profilers.stragglers import stragglers

FOUR_NODES = Path(__file__).parents[2] / "examples/profiles/four-nodes"
GIGABIT = 1.25e8
SLOWED = 2


def test_only_the_slowed_node_is_named() -> None:
    (found,) = stragglers(read_profile(FOUR_NODES))
    assert (found.what, found.where, found.doing) == ("node", "node-2", "sending")
    assert 4.0 < found.ratio < 6.0


def test_links_are_as_they_were_set() -> None:
    links = links_of(read_profile(FOUR_NODES))
    assert len(links) == 12
    for link in links:
        rate = 0.2 * GIGABIT if link.sender == SLOWED else GIGABIT
        # The token bucket's burst and the relay's queue move single links of the fast nodes.
        assert link.bytes_per_s == pytest.approx(rate, rel=0.20)
        assert link.latency_s is not None
        assert 1.0e-3 < link.latency_s < 1.25e-3
    fast = [link.bytes_per_s for link in links if link.sender != SLOWED]
    assert float(np.median(fast)) == pytest.approx(GIGABIT, rel=0.15)


def test_a_profile_is_a_link_matrix_too() -> None:
    matrix = read_link_matrix(FOUR_NODES)
    assert matrix.nodes == ("node-0", "node-1", "node-2", "node-3")
    slow = matrix.bytes_per_s_NN[SLOWED]
    assert np.isinf(slow[SLOWED])
    assert np.delete(slow, SLOWED).max() < 0.3 * np.delete(matrix.bytes_per_s_NN[0], 0).min()
