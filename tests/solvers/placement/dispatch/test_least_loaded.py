from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.least_loaded import LeastLoaded, plan
from solvers.placement.ranks import Placement, Ranks
from tests.solvers.placement.dispatch.testing import sample_case

FREE = LeastLoaded(capacity_ratio=1.0, min_chunk_tokens=0.0, gate_ratio=0.0)


def _case(*loads: float, ranks: int) -> DispatchCase:
    return DispatchCase(
        load_PLE=np.array([[loads]]),
        placement=Placement(expert_LS=np.arange(len(loads))[None, :]),
        ranks=Ranks.uniform(ranks=ranks, slots_per_rank=len(loads) // ranks),
    )


def _reference_plan(case: DispatchCase, knobs: LeastLoaded) -> tuple[list[float], int]:
    """Walk the published algorithm for the first pass and layer, one expert after another."""
    loads = case.load_PLE[0, 0].tolist()
    ranks = case.ranks.num_ranks
    home = np.argmax(case.copies_LEG[0], axis=1).tolist()
    pending = [sum(w for w, h in zip(loads, home, strict=True) if h == g) for g in range(ranks)]
    mean = sum(loads) / ranks
    if max(pending) < knobs.gate_ratio * mean:
        return pending, 0
    cap, taken, copies = knobs.capacity_ratio * mean, [0.0] * ranks, set()
    for expert in sorted(range(len(loads)), key=lambda e: (-loads[e], e)):
        native, rest = home[expert], loads[expert]
        pending[native] -= rest
        stay = max(0.0, min(rest, cap - taken[native] - pending[native]))
        taken[native] += stay
        rest -= stay
        while rest > 0.0:
            others = sorted(
                (g for g in range(ranks) if g != native), key=lambda g: (taken[g] + pending[g], g)
            )
            for other in others:
                piece = min(rest, cap - taken[other] - pending[other])
                if piece <= 0.0 or (piece < knobs.min_chunk_tokens and rest > piece):
                    continue
                break
            else:
                other, piece = others[0], rest
            taken[other] += piece
            copies.add((expert, other))
            rest = 0.0 if piece >= rest else rest - piece
    return taken, len(copies)


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 100_000),
    capacity=st.sampled_from((1.0, 1.1, 1.5)),
    chunk=st.sampled_from((0.0, 30.0, 1000.0)),
    gate=st.sampled_from((0.0, 1.3)),
)
def test_it_follows_the_published_algorithm(
    seed: int, capacity: float, chunk: float, gate: float
) -> None:
    ranks = Ranks.uniform(ranks=4, slots_per_rank=3)
    case = sample_case(passes=1, layers=1, experts=12, ranks=ranks, seed=seed, tokens=40.0)
    knobs = LeastLoaded(capacity_ratio=capacity, min_chunk_tokens=chunk, gate_ratio=gate)
    loads, copies = _reference_plan(case, knobs)
    planned = plan(case, knobs=knobs)
    assert planned.load_PLG[0, 0].tolist() == pytest.approx(loads)
    assert planned.received_PLG.sum(axis=2)[0, 0] == copies


def test_surplus_by_hand() -> None:
    # Cap (12 + 0 + 4 + 0) / 2 = 8. Expert 0 keeps 8 of 12 at home, 4 go to rank 1.
    planned = plan(_case(12.0, 0.0, 4.0, 0.0, ranks=2), knobs=FREE)
    assert planned.load_PLG[0, 0].tolist() == [8.0, 8.0]
    assert planned.sent_PLG[0, 0].tolist() == [1, 0]
    assert planned.received_PLG[0, 0].tolist() == [0, 1]
    assert planned.received_PLG.sum(axis=2)[0, 0] == 1
    # Expert 0 on both; experts 1 and 3 have no tokens.
    assert planned.active_PLG[0, 0].tolist() == [1, 2]


def test_the_gate_does_not_move_even_loads() -> None:
    planned = plan(_case(11.0, 9.0, ranks=2), knobs=replace(FREE, gate_ratio=1.3))
    assert planned.load_PLG[0, 0].tolist() == [11.0, 9.0]
    assert planned.received_PLG.sum(axis=2)[0, 0] == 0


def test_without_a_smallest_chunk_every_rank_ends_at_the_cap() -> None:
    ranks = Ranks.uniform(ranks=8, slots_per_rank=4)
    case = sample_case(passes=6, layers=3, experts=32, ranks=ranks, seed=4)
    loads = plan(case, knobs=FREE).load_PLG
    np.testing.assert_allclose(loads, np.broadcast_to(loads.mean(2, keepdims=True), loads.shape))


def test_replicas_are_refused_with_the_way_out() -> None:
    ranks = Ranks.uniform(ranks=2, slots_per_rank=3)
    case = sample_case(passes=1, layers=1, experts=4, ranks=ranks, seed=0)
    with pytest.raises(ValueError, match="6 slots for 4 experts, give it one slot an expert"):
        plan(case, knobs=FREE)


def test_a_capacity_below_the_mean_is_refused() -> None:
    with pytest.raises(ValueError, match=r"capacity_ratio 0\.5"):
        LeastLoaded(capacity_ratio=0.5)
