from pathlib import Path

import numpy as np
import pytest

from profilers.errors import ProfileUnreadableError
from profilers.imports.link_matrix import LinkMatrix, link_matrix_csv
from tests.expect import refused
from tests.rows import each_row
from tuner.errors import SpecError
from tuner.search.nodes.node_order import order_nodes, read_links
from tuner.search.nodes.traffic import NodeTraffic
from tuner.spec.cluster import Cluster, Pool

LIMIT_S = 30.0


def ring(nodes: int, *, hidden_s: float = 0.0) -> NodeTraffic:
    """One stage on so many nodes that sum 30 GB of gradients."""
    return NodeTraffic(
        nodes_of_stage=nodes,
        groups=1,
        num_microbatches=8,
        hop_bytes=0.0,
        block=1,
        all_to_all_bytes_S=np.zeros(1),
        gradient_bytes_S=np.full(1, 30e9),
        block_gradient_bytes_S=np.zeros(1),
        hidden_s=hidden_s,
    )


def pool(nodes: int) -> Pool:
    """Eight cards of 50 GB/s a node."""
    return Pool(name="p", device="h100-sxm", nodes=nodes, devices_per_node=8, nic=50e9)


def matrix(nodes: int, slow: dict[tuple[int, int], float] | None = None) -> LinkMatrix:
    rates_NN = np.full((nodes, nodes), 400e9)
    np.fill_diagonal(rates_NN, np.inf)
    for (one, two), rate in (slow or {}).items():
        rates_NN[one, two] = rates_NN[two, one] = rate
    return LinkMatrix(nodes=tuple(f"n{node}" for node in range(nodes)), bytes_per_s_NN=rates_NN)


def test_equal_links_keep_the_listed_order_and_cost_nothing() -> None:
    found = order_nodes(ring(4), matrix(4), pool=pool(4), time_limit_s=LIMIT_S)
    assert found.nodes == ("n0", "n1", "n2", "n3")
    assert (found.slow_before_s, found.slow_s, found.slow_bound_s) == (0.0, 0.0, 0.0)


def test_a_ring_goes_around_a_slow_link() -> None:
    found = order_nodes(ring(4), matrix(4, {(0, 1): 40e9}), pool=pool(4), time_limit_s=LIMIT_S)
    # 2 * 3/4 * 30 GB at 40 rather than 400 GB/s
    assert found.slow_before_s == pytest.approx(1.125 - 0.1125)
    assert found.slow_s == pytest.approx(0.0)
    at = {node: place for place, node in enumerate(found.nodes)}
    assert abs(at["n0"] - at["n1"]) == 2


def test_a_slow_node_is_the_spare_one() -> None:
    slow = {(2, other): 40e9 for other in (0, 1, 3, 4)}
    found = order_nodes(ring(4), matrix(5, slow), pool=pool(5), time_limit_s=LIMIT_S)
    assert found.spare == ("n2",)
    assert found.slow_s == pytest.approx(0.0)
    assert found.slow_before_s > 1.0


def test_a_slow_node_without_a_spare_costs_what_the_bound_says() -> None:
    slow = {(2, other): 40e9 for other in (0, 1, 3)}
    found = order_nodes(ring(4), matrix(4, slow), pool=pool(4), time_limit_s=LIMIT_S)
    assert found.slow_s == pytest.approx(1.125 - 0.1125)
    assert found.slow_bound_s == pytest.approx(found.slow_s)


def test_what_hides_behind_the_backward_pass_is_not_counted() -> None:
    slow = {(2, other): 40e9 for other in (0, 1, 3)}
    found = order_nodes(ring(4, hidden_s=0.5), matrix(4, slow), pool=pool(4), time_limit_s=LIMIT_S)
    assert found.slow_s == pytest.approx(1.125 - 0.5)
    assert found.slow_bound_s <= found.slow_s


@each_row("factor", [0.125, 3.0])
def test_the_cards_set_the_level_and_the_matrix_the_differences(factor: float) -> None:
    links = matrix(4, {(0, 1): 40e9, (2, 3): 40e9, (0, 2): 40e9})
    scaled = LinkMatrix(nodes=links.nodes, bytes_per_s_NN=factor * links.bytes_per_s_NN)
    found, again = (
        order_nodes(ring(4), one, pool=pool(4), time_limit_s=LIMIT_S) for one in (links, scaled)
    )
    assert again.nodes == found.nodes
    assert again.slow_s == pytest.approx(found.slow_s)


def test_links_inside_a_domain_of_many_nodes_are_taken_as_measured() -> None:
    wide = Pool(name="p", device="h100-sxm", nodes=4, devices_per_node=8, scale_up_domain=32)
    links = matrix(4, {(2, other): 40e9 for other in (0, 1, 3)})
    found, slower = (
        order_nodes(ring(4), one, pool=wide, time_limit_s=LIMIT_S)
        for one in (links, LinkMatrix(nodes=links.nodes, bytes_per_s_NN=links.bytes_per_s_NN / 2))
    )
    assert slower.slow_s == pytest.approx(2 * found.slow_s)


def test_a_matrix_of_other_nodes_than_the_pools_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "links.csv"
    path.write_text(link_matrix_csv(matrix(3)))
    three, four = (pool(n).model_copy(update={"link_matrix": path}) for n in (3, 4))
    assert read_links(Cluster(pools=(three,)))["p"].nodes == ("n0", "n1", "n2")
    assert read_links(Cluster(pools=(pool(4),))) == {}
    with refused(SpecError, match="is of 3 nodes, the pool has 4; measure every pair"):
        read_links(Cluster(pools=(four,)))
    path.write_text("nothing")
    with pytest.raises(ProfileUnreadableError, match="first cell of a link matrix"):
        read_links(Cluster(pools=(three,)))
