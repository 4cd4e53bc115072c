import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner.errors import SpecError
from tuner.search.train.pools.build_problem import spares_by_pool
from tuner.spec.cluster import Pool


def pools(*nodes: int) -> list[Pool]:
    return [
        Pool(name=f"p{at}", device="h100-sxm", nodes=count, devices_per_node=8)
        for at, count in enumerate(nodes)
    ]


@each_row(
    ("nodes", "spare_nodes", "expected"),
    [
        ((64, 64), 0, (0, 0)),
        ((32, 64), 1, (0, 1)),
        ((64, 64), 1, (1, 0)),
        ((64, 64), 2, (1, 1)),
        # Shares of 96: 64 / 3 = 21.3 goes before 32; then 32, and 64 / 5.
        ((64, 32), 3, (2, 1)),
        ((1, 9), 8, (0, 8)),
    ],
)
def test_spares_follow_the_machines(
    nodes: tuple[int, ...], spare_nodes: int, expected: tuple[int, ...]
) -> None:
    assert spares_by_pool(pools(*nodes), spare_nodes) == expected


def test_every_pool_keeps_a_node_that_works() -> None:
    with pytest.raises(SpecError, match="of 6 nodes in 2 pools keep back 4 at most"):
        spares_by_pool(pools(2, 4), 5)


@given(nodes=st.lists(st.integers(1, 40), min_size=1, max_size=4), share=st.floats(0.0, 1.0))
@settings(deadline=None, max_examples=50)
def test_shares_add_up_and_stay_near_proportion(nodes: list[int], share: float) -> None:
    spare_nodes = int(share * sum(count - 1 for count in nodes))
    shares = spares_by_pool(pools(*nodes), spare_nodes)
    assert sum(shares) == spare_nodes
    assert all(0 <= kept < count for kept, count in zip(shares, nodes, strict=True))
