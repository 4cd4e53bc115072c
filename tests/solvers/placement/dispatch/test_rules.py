"""The contract of every dispatch rule."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.ranks import Floats, Placement, Ranks
from tests.solvers.placement.dispatch.testing import RULES, rank_loads, sample_case
from tests.solvers.refusals import unrefused

REPLICATING = [rule for rule in RULES if rule != "least_loaded"]


def _case(*, seed: int, slots_per_rank: int = 3) -> DispatchCase:
    ranks = Ranks.uniform(ranks=6, slots_per_rank=slots_per_rank, ranks_per_node=2)
    return sample_case(passes=5, layers=4, experts=12, ranks=ranks, seed=seed)


def _largest(loads_PLG: Floats) -> Floats:
    largest_PL: Floats = loads_PLG.max(axis=2)
    return largest_PL


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_every_token_copy_is_computed_once(seed: int) -> None:
    for rule in RULES:
        case = _case(seed=seed, slots_per_rank=2 if rule == "least_loaded" else 3)
        loads = rank_loads(rule, case)
        assert loads.shape == (5, 4, 6), rule
        assert (loads >= 0.0).all(), rule
        np.testing.assert_allclose(
            loads.sum(axis=2), case.load_PLE.sum(axis=2), rtol=1e-9, err_msg=rule
        )


@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_nothing_beats_the_best_split(seed: int) -> None:
    case = _case(seed=seed)
    best = _largest(rank_loads("lp", case))
    for rule in REPLICATING:
        assert (best <= _largest(rank_loads(rule, case)) * (1.0 + 1e-6)).all(), rule


def test_a_rank_only_computes_what_it_holds() -> None:
    # Expert 0 is on ranks 0 and 1, expert 1 on rank 2.
    case = DispatchCase(
        load_PLE=np.array([[[6.0, 5.0]]]),
        placement=Placement(expert_LS=np.array([[0, 0, 1]])),
        ranks=Ranks.uniform(ranks=3, slots_per_rank=1),
    )
    for rule in REPLICATING:
        loads = rank_loads(rule, case)[0, 0]
        assert loads[2] == 5.0, rule
        assert loads[:2].sum() == pytest.approx(6.0), rule


def test_without_replicas_there_is_nothing_to_choose() -> None:
    case = _case(seed=3, slots_per_rank=2)
    even = rank_loads("even", case)
    for rule in REPLICATING:
        np.testing.assert_allclose(rank_loads(rule, case), even, err_msg=rule)


def test_a_pass_without_tokens_loads_nobody() -> None:
    case = _case(seed=1, slots_per_rank=2)
    idle = DispatchCase(
        load_PLE=np.zeros_like(case.load_PLE), placement=case.placement, ranks=case.ranks
    )
    assert not [rule for rule in RULES if rank_loads(rule, idle).any()]


def test_what_is_no_case_is_refused() -> None:
    rows: tuple[tuple[dict[str, Any], str], ...] = (
        ({"load_PLE": np.full((1, 1, 3), np.nan)}, "non-negative numbers"),
        ({"load_PLE": np.full((1, 1, 3), -1.0)}, "non-negative numbers"),
        ({"load_PLE": np.ones((1, 2, 3))}, r"placement has shape \(1, 4\), expected \(2, 4\)"),
        ({"load_PLE": np.ones((1, 1, 4))}, "every expert needs a replica"),
        ({"load_PLE": np.ones((1, 1, 2))}, "ids must be in 0..1"),
        ({"load_PLE": np.ones((0, 1, 3))}, "none of them empty"),
    )

    def make(**changes: Any) -> DispatchCase:
        given_: dict[str, Any] = {
            "load_PLE": np.ones((1, 1, 3)),
            "placement": Placement(expert_LS=np.array([[0, 1, 2, 0]])),
            "ranks": Ranks.uniform(ranks=2, slots_per_rank=2),
        }
        return DispatchCase(**(given_ | changes))

    assert unrefused(make, rows) == []
