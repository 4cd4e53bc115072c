import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.config.columns import Strategies
from tuner.config.shapes import Hardware
from tuner.prices.train.collectives import (
    Group,
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    bus_bytes_per_s,
    distinct_places,
    groups,
    send_s,
)
from tuner.prices.train.constants import Constants

MACHINE = Hardware(
    matmul_flop_per_s=100e12,
    attention_flop_per_s=100e12,
    compute_units=100.0,
    memory_bytes=80e9,
    memory_bytes_per_s=2e12,
    scale_up_bytes_per_s=400e9,
    domain=8.0,
    devices_per_node=8.0,
    scale_out_bytes_per_s=50e9,
)
PLAIN = Constants(
    scale_up_ratio=1.0,
    scale_out_ratio=1.0,
    all_to_all_ratio=1.0,
    far_all_to_all_ratio=0.5,
    collective_s=0.0,
    hop_s=0.0,
    far_hop_s=0.0,
)


def strategies(**degrees: float) -> Strategies:
    return Strategies(sequence=1024.0, micro_batch=1.0, num_microbatches=8.0, **degrees)


def test_megatron_puts_tensor_ranks_inside_and_pipeline_ranks_outside() -> None:
    # 2 x 2 x 4 x 2 = 32 ranks: tp 0-1, cp next, so that 2 of the 4 data ranks share 8 devices.
    laid = groups(strategies(tensor=2.0, context=2.0, data=4.0, pipeline=2.0, expert=4.0), MACHINE)
    assert (laid.tensor.inside, laid.context.inside, laid.data.inside) == (2.0, 2.0, 2.0)
    assert (laid.shared.ranks, laid.shared.inside) == (8.0, 4.0)
    assert laid.boundary.inside == 1.0
    # Experts: ep 4 of the stage's 16 ranks, then edp 4, of which 2 lie in the domain.
    assert (laid.expert.inside, laid.expert_data.ranks, laid.expert_data.inside) == (4.0, 4.0, 2.0)


def test_another_order_brings_data_ranks_inside() -> None:
    laid = groups(strategies(tensor=8.0, data=8.0), MACHINE, order=("dp", "tp", "cp", "ep", "pp"))
    assert (laid.data.inside, laid.tensor.inside) == (8.0, 1.0)


def test_refuses_an_order_that_leaves_a_dimension_out() -> None:
    with pytest.raises(ValueError, match="must name each of tp, cp, ep, dp, pp once"):
        groups(strategies(), MACHINE, order=("tp", "pp"))


def test_a_group_uses_the_nics_of_all_its_members_in_a_node() -> None:
    inside = [Group(ranks=16.0, inside=members) for members in (1.0, 4.0, 8.0)]
    actual = [float(bus_bytes_per_s(group, MACHINE, PLAIN)) for group in inside]
    # 50 GB/s per member, and never more than the 400 GB/s inside.
    assert actual == pytest.approx([50e9, 200e9, 400e9])


def test_rings_move_what_nccl_counts() -> None:
    group = Group(ranks=8.0, inside=8.0)
    assert all_gather_s(8e9, group, MACHINE, PLAIN) == pytest.approx(7 / 8 * 8e9 / 400e9)
    assert all_reduce_s(8e9, group, MACHINE, PLAIN) == pytest.approx(2 * 7 / 8 * 8e9 / 400e9)


GENERIC = Constants()


def test_a_group_of_one_rank_needs_no_time() -> None:
    isolated = Group(ranks=1.0, inside=1.0)
    assert all_gather_s(1e9, isolated, MACHINE, GENERIC) == 0.0
    assert all_reduce_s(1e9, isolated, MACHINE, GENERIC) == 0.0
    assert send_s(1e9, isolated, MACHINE, GENERIC) == 0.0
    assert all_to_all_s(0.0, 0.0, isolated, MACHINE, GENERIC) == 0.0


def test_an_all_to_all_between_nodes_is_as_slow_as_its_nic() -> None:
    group = Group(ranks=16.0, inside=8.0)
    plain = all_to_all_s(1e9, 1e9, group, MACHINE, PLAIN)
    merged = all_to_all_s(1e9, 1e9, group, MACHINE, PLAIN, is_merged=1.0)
    assert plain == pytest.approx(1e9 / 25e9)
    assert merged == pytest.approx(1e9 / 50e9)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(2, 512).map(float),
    st.integers(1, 8).map(float),
    st.floats(1e3, 1e10),
    st.floats(1.0, 4.0),
)
def test_more_bandwidth_never_makes_a_collective_slower(
    ranks: float, inside: float, total: float, faster: float
) -> None:
    better = Hardware(
        **{
            **{name: getattr(MACHINE, name) for name in MACHINE.__dataclass_fields__},
            "scale_up_bytes_per_s": 400e9 * faster,
            "scale_out_bytes_per_s": 50e9 * faster,
        }
    )
    group = Group(ranks=ranks, inside=min(inside, ranks))
    for collective_s in (all_gather_s, all_reduce_s, send_s):
        before = float(collective_s(total, group, MACHINE, GENERIC))
        assert float(collective_s(total, group, better, GENERIC)) <= before * (1 + 1e-12)


def test_distinct_places_count_what_a_balanced_draw_reaches() -> None:
    # 8 of 256 experts over 4 nodes of 64 each: 4 (1 - C(192, 8) / C(256, 8)).
    expected = 4 * (1 - math.comb(192, 8) / math.comb(256, 8))
    assert distinct_places(4.0, 256.0, 8.0) == pytest.approx(expected)
    assert distinct_places(1.0, 256.0, 8.0) == pytest.approx(1.0)
    columns = distinct_places(np.array([8.0, 8.0]), np.array([8.0, 64.0]), np.array([2.0, 1.0]))
    # One expert per place: k places. One expert chosen: one place.
    assert columns == pytest.approx([2.0, 1.0])


# HierMoE (arXiv 2508.09591), table II: percent of token copies that are duplicates, measured with
# 128 experts, by (places, top_k).
PUBLISHED_PERCENT = {
    (32, 2): 2, (32, 4): 4, (32, 6): 7, (32, 8): 9,
    (16, 2): 3, (16, 4): 9, (16, 6): 14, (16, 8): 18,
    (8, 2): 6, (8, 4): 17, (8, 6): 27, (8, 8): 34,
    (4, 2): 12, (4, 4): 32, (4, 6): 46, (4, 8): 55,
}  # fmt: skip


def test_duplicates_are_within_1_6_points_of_the_published_table() -> None:
    for (places, top_k), percent in PUBLISHED_PERCENT.items():
        reached = float(distinct_places(float(places), 128.0, float(top_k)))
        assert 100.0 * (1.0 - reached / top_k) == pytest.approx(percent, abs=1.6)
