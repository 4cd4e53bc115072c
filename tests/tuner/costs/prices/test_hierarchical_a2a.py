"""HierMoE (arXiv 2508.09591): its duplication table, its recursion, and its choice of depth."""

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner.config.columns import Numbers
from tuner.costs.prices.hierarchical_a2a import (
    Hop,
    Levels,
    best_depth,
    dispatch_s,
    two_levels,
)
from tuner.costs.train.collectives import Group, all_to_all_s, distinct_places
from tuner.costs.train.constants import Constants
from tuner.costs.train.shapes import Hardware

# Table II: percent of token copies that are duplicates, measured with 128 experts, by
# (places, top_k).
PUBLISHED_PERCENT = {
    (32, 2): 2, (32, 4): 4, (32, 6): 7, (32, 8): 9,
    (16, 2): 3, (16, 4): 9, (16, 6): 14, (16, 8): 18,
    (8, 2): 6, (8, 4): 17, (8, 6): 27, (8, 8): 34,
    (4, 2): 12, (4, 4): 32, (4, 6): 46, (4, 8): 55,
}  # fmt: skip


def _hop(fit: tuple[float, float]) -> Hop:
    return Hop(latency_s=fit[0] / 1e3, s_per_byte=fit[1] / 1e3)


# Figure 9: fits on 4 nodes x 8 A6000, as (milliseconds, milliseconds per byte).
TESTBED = Levels(
    groups=(4.0, 8.0, 16.0),
    ranks=32.0,
    plain=_hop((7.22e-1, 5.70e-7)),
    inter=tuple(_hop(fit) for fit in ((4.97e-1, 5.29e-7), (3.01e-1, 1.17e-7), (1.49e-1, 2.06e-8))),
    intra=tuple(_hop(fit) for fit in ((5.71e-1, 1.27e-7), (1.14e-1, 2.63e-8), (2.04e-1, 1.64e-8))),
)


def balanced_reach(levels: Levels, *, experts: float, top_k: float) -> tuple[Numbers, ...]:
    """Places of each level that a token needs on average when every expert is equally likely."""
    return tuple(distinct_places(places, experts, top_k) for places in levels.places)


def duplicate_ratio(*, places: float, experts: float, top_k: float) -> float:
    """Share of the k copies of a token that a link to `places` would carry twice."""
    return 1.0 - float(distinct_places(places, experts, top_k)) / top_k


@each_row(("places", "top_k"), PUBLISHED_PERCENT)
def test_duplicates_are_within_1_6_points_of_the_published_table(places: int, top_k: int) -> None:
    actual = 100.0 * duplicate_ratio(places=float(places), experts=128.0, top_k=float(top_k))
    assert actual == pytest.approx(PUBLISHED_PERCENT[places, top_k], abs=1.6)


def test_duplicates_of_two_of_four_experts_by_hand() -> None:
    # Two places of two experts: of the 6 pairs 2 lie in one place, so a token needs 5/3 places
    # and 1 - (5/3) / 2 = 1/6 of its copies are double.
    actual = duplicate_ratio(places=2.0, experts=4.0, top_k=2.0)
    assert actual == pytest.approx(1 / 6)


def test_every_depth_by_hand_on_the_published_fit() -> None:
    # Qwen3-30B-A3B: 1024 tokens a rank, rows of 2048 bf16 numbers, 8 of 128 experts: a token needs
    # 3.629, 5.339, 6.597, 7.359 of 4, 8, 16, 32 places; times 4,194,304 bytes: 15.22, 22.39,
    # 27.67, 30.87 MB.
    reached = balanced_reach(TESTBED, experts=128.0, top_k=8.0)
    assert [float(places) for places in reached] == pytest.approx(
        [n * (1 - math.comb(128 - 128 // n, 8) / math.comb(128, 8)) for n in (4, 8, 16, 32)]
    )
    time_DC = dispatch_s(TESTBED, reached=reached, tokens=1024.0, row_bytes=4096.0)
    by_hand = [
        0.722 + 30.87 * 0.570,
        0.497 + 15.22 * 0.529 + 0.571 + 30.87 * 0.127,
        0.497 + 15.22 * 0.529 + 0.301 + 22.39 * 0.117 + 0.114 + 30.87 * 0.0263,
        0.497 + 15.22 * 0.529 + 0.301 + 22.39 * 0.117 + 0.149 + 27.67 * 0.0206
        + 0.204 + 30.87 * 0.0164,
    ]  # fmt: skip
    assert (1e3 * time_DC[:, 0]).tolist() == pytest.approx(by_hand, rel=1e-3)
    # The paper measures 1.26x for depth 2 and more for the best depth, which it finds above 2.
    depth, best_s = best_depth(time_DC)
    assert depth.tolist() == [3]
    assert float(time_DC[0, 0] / time_DC[1, 0]) == pytest.approx(1.26, rel=0.15)
    assert best_s[0] < time_DC[1, 0] < time_DC[0, 0]


# Table IV, as printed: speed of the all-to-all over Megatron-LM's at the fixed depth 2 and at the
# best depth, by (top_k, experts), on 32 devices.
PUBLISHED_GAINS = {
    (6, 128): (0.95, 1.37),
    (8, 128): (1.26, 1.72),
    (10, 128): (1.30, 1.82),
    (8, 64): (1.12, 1.57),
    (8, 256): (1.18, 1.61),
}


def test_gains_at_the_best_depth_are_within_15_percent_of_the_published_table() -> None:
    # The table names K and E alone. Its row of K 8 and E 128 equals the paper's figure for
    # Qwen3-30B-A3B, so that model's rows of 2048 bf16 numbers and the micro-batch of 1024 tokens
    # are taken for all of them; routing is taken as balanced, which the paper's is not.
    ratios = []
    for (top_k, experts), (_, published) in PUBLISHED_GAINS.items():
        reached = balanced_reach(TESTBED, experts=float(experts), top_k=float(top_k))
        time_DC = dispatch_s(TESTBED, reached=reached, tokens=1024.0, row_bytes=4096.0)
        depth, best_s = best_depth(time_DC)
        assert depth.tolist() == [3]
        ratios.append(float(time_DC[0, 0] / best_s[0]) / published)
    # Predicted 1.28, 1.48, 1.67, 1.50, 1.47: all below what was measured; real tokens may choose
    # neighbouring experts more often than balanced ones, which leaves more copies out.
    assert all(0.85 <= ratio <= 1.0 for ratio in ratios), ratios


def test_gains_at_depth_2_exceed_the_published_table() -> None:
    """A miss: the model promises 11 to 31 % more of the fixed depth than the paper measures."""
    for (top_k, experts), (published, _) in PUBLISHED_GAINS.items():
        reached = balanced_reach(TESTBED, experts=float(experts), top_k=float(top_k))
        time_DC = dispatch_s(TESTBED, reached=reached, tokens=1024.0, row_bytes=4096.0)
        assert 1.10 <= float(time_DC[0, 0] / time_DC[1, 0]) / published <= 1.35


def test_replayed_hops_send_what_the_closed_form_says() -> None:
    """Equations 3-5 and 7 on drawn tokens: what each rank sends in either hop."""
    rng = np.random.default_rng(11)
    experts, top_k, tokens, groups, positions = 32, 4, 3000, 4, 2
    first_GP = np.zeros((groups, positions))  # sent by rank (group, position) between groups
    second_GP = np.zeros((groups, positions))  # sent by it inside the group, after the first hop
    for group in range(groups):
        for position in range(positions):
            picks_TK = np.array([rng.permutation(experts)[:top_k] for _ in range(tokens)])
            needs_TE: npt.NDArray[np.bool_] = np.zeros((tokens, experts), dtype=bool)
            np.put_along_axis(needs_TE, picks_TK, values=True, axis=1)
            needs_TGPE = needs_TE.reshape(tokens, groups, positions, -1)
            needs_TGP: npt.NDArray[np.bool_] = np.any(needs_TGPE, axis=3)
            first_GP[group, position] = np.any(needs_TGP, axis=2).sum()
            # A token rests on the rank of the same position in every group that it needs.
            second_GP[:, position] += needs_TGP.sum(axis=(0, 2))
    levels = Levels(
        groups=(float(groups),),
        ranks=float(groups * positions),
        plain=Hop(latency_s=0.0, s_per_byte=1.0),
        inter=(Hop(latency_s=0.0, s_per_byte=1.0),),
        intra=(Hop(latency_s=0.0, s_per_byte=1000.0),),
    )
    reached = balanced_reach(levels, experts=float(experts), top_k=float(top_k))
    time_DC = dispatch_s(levels, reached=reached, tokens=float(tokens), row_bytes=1.0)
    replayed = float(first_GP.mean() + 1000.0 * second_GP.mean())
    assert time_DC[1, 0] == pytest.approx(replayed, rel=0.01)
    assert float(reached[0]) * tokens == pytest.approx(float(first_GP.mean()), rel=0.01)


HARDWARE = Hardware(
    matmul_flop_per_s=1e15,
    attention_flop_per_s=1e15,
    compute_units=132.0,
    memory_bytes=80e9,
    memory_bytes_per_s=3e12,
    scale_up_bytes_per_s=450e9,
    domain=8.0,
    devices_per_node=8.0,
    scale_out_bytes_per_s=50e9,
)


def test_columns_are_priced_together_and_a_single_domain_needs_no_second_hop() -> None:
    group = Group(ranks=np.array([8.0, 64.0, 64.0]), inside=np.array([8.0, 8.0, 1.0]))
    levels = two_levels(group, hardware=HARDWARE, constants=Constants())
    reached = balanced_reach(levels, experts=256.0, top_k=8.0)
    time_DC = dispatch_s(levels, reached=reached, tokens=4096.0, row_bytes=14336.0)
    assert time_DC.shape == (2, 3)
    depth, _ = best_depth(time_DC)
    # Eight ranks in one domain: both depths are the same hop; across domains de-duplication pays;
    # ranks that lie one to a domain have nobody to pass on to.
    assert depth.tolist() == [1, 2, 1]
    assert time_DC[0, 0] == time_DC[1, 0]


@each_row(("ranks", "inside"), [(64.0, 8.0), (8.0, 8.0), (16.0, 1.0)])
def test_without_duplicates_one_hop_is_the_analytic_model_s_all_to_all(
    ranks: float, inside: float
) -> None:
    group, copies = Group(ranks=ranks, inside=inside), 1e9
    levels = two_levels(group, hardware=HARDWARE, constants=Constants())
    actual = dispatch_s(levels, reached=(1.0, 1.0), tokens=1.0, row_bytes=copies)[0, 0]
    expected = all_to_all_s(
        copies * (inside - 1.0) / ranks,
        copies * (ranks - inside) / ranks,
        group,
        HARDWARE,
        Constants(),
    )
    assert actual == pytest.approx(float(expected))


@given(
    faster=st.floats(1.0, 10.0),
    tokens=st.floats(1.0, 1e5),
    top_k=st.integers(1, 16),
    ranks=st.sampled_from([8.0, 16.0, 32.0, 64.0]),
    inside=st.sampled_from([1.0, 4.0, 8.0]),
)
@settings(deadline=None, max_examples=100)
def test_a_faster_network_never_makes_dispatch_slower(
    faster: float, tokens: float, top_k: int, ranks: float, inside: float
) -> None:
    group = Group(ranks=ranks, inside=inside)
    times = []
    for out in (50e9, 50e9 * faster):
        hardware = replace(HARDWARE, scale_out_bytes_per_s=out)
        levels = two_levels(group, hardware=hardware, constants=Constants())
        reached = balanced_reach(levels, experts=256.0, top_k=float(top_k))
        times.append(dispatch_s(levels, reached=reached, tokens=tokens, row_bytes=4096.0))
    assert np.all(times[1] <= times[0] * (1 + 1e-12))
    _, best_s = best_depth(times[0])
    assert np.all(best_s <= times[0][0])


def test_a_hierarchy_states_both_hops_of_every_level() -> None:
    with pytest.raises(ValueError, match="1 levels of groups, but 0 inter"):
        Levels(
            groups=(2.0,),
            ranks=4.0,
            plain=Hop(latency_s=0.0, s_per_byte=0.0),
            inter=(),
            intra=(Hop(latency_s=0.0, s_per_byte=0.0),),
        )
