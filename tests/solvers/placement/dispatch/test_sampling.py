from dataclasses import replace

import numpy as np
import pytest

from solvers.errors import UnknownSolverError
from solvers.placement.dispatch import launches, lp, sampling
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.sampling import SPLITS, expected_loads, split_of
from solvers.placement.ranks import Floats, Ranks
from tests.solvers.placement.dispatch.testing import sample_case, sampled_loads

RANKS = Ranks.uniform(ranks=8, slots_per_rank=5, ranks_per_node=4)


def test_shares_of_every_rule_sum_to_one_on_hosts() -> None:
    case = sample_case(passes=1, layers=3, experts=24, ranks=RANKS, seed=1)
    for rule in SPLITS:
        launched = launches.splits(case, launches=1) if rule == "static" else ()
        for share_LS in (split_of(rule)(case), *launched):
            total_LE = np.zeros(case.copies_LE.shape)
            experts = (np.arange(3)[:, None], case.placement.expert_LS)
            np.add.at(total_LE, experts, share_LS.reshape(3, -1))
            np.testing.assert_allclose(total_LE, 1.0, err_msg=rule)
            assert (share_LS >= 0.0).all(), rule


def test_samples_keep_every_token_and_scatter_about_the_expected_load() -> None:
    case = sample_case(passes=1, layers=2, experts=24, ranks=RANKS, seed=3)
    for rule in SPLITS:
        drawn = np.stack([sampled_loads(rule, replace(case, seed=seed)) for seed in range(64)])
        total_PL = np.broadcast_to(case.load_PLE.sum(axis=-1), drawn.shape[:-1])
        np.testing.assert_allclose(drawn.sum(axis=-1), total_PL, err_msg=rule)
        off = np.abs(drawn.mean(axis=0) - expected_loads(rule, case))
        # Standard errors of a mean of 64 draws; the largest of 16.
        assert (off <= 4.0 * drawn.std(axis=0) / 8.0 + 1e-6).all(), rule
        assert (drawn.std(axis=0).max() > 0.0) == (rule != "even"), rule


def test_loads_scatter_by_the_root_of_the_tokens() -> None:
    case = sample_case(passes=1, layers=2, experts=24, ranks=RANKS, seed=4)
    for rule in ("dynamic", "near_dynamic", "near_lp"):
        spread = []
        for scale in (1, 64):
            scaled = replace(case, load_PLE=case.load_PLE * scale)
            drawn = [sampled_loads(rule, replace(scaled, seed=seed)) for seed in range(32)]
            spread.append(np.std(drawn, axis=0).mean() / scale)
        # 64 times the tokens: an eighth of the spread, known to about 3 % from 16 x 32 draws.
        assert 7.0 < spread[0] / spread[1] < 9.2, (rule, spread)


def test_unknown_rules_are_refused() -> None:
    case = sample_case(passes=1, layers=1, experts=24, ranks=RANKS, seed=5)
    with pytest.raises(UnknownSolverError, match="'fake' is not one of even, dynamic"):
        expected_loads("fake", case)


def test_a_linear_program_is_solved_once_for_a_placement_and_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = sample_case(passes=3, layers=2, experts=24, ranks=RANKS, seed=20)
    solved: list[Floats] = []

    def splits(some: DispatchCase) -> Floats:
        solved.extend(some.load_PLE)
        return solve(some)

    solve = lp.slot_splits
    monkeypatch.setattr(lp, "slot_splits", splits)
    first = expected_loads("near_lp", case)
    assert len(solved) == 3
    assert np.array_equal(expected_loads("near_lp", case), first)
    expected_loads("lp", case)
    assert len(solved) == 3
    expected_loads("near_lp", replace(case, load_PLE=case.load_PLE * 2.0 + np.arange(24.0)))
    assert len(solved) == 6


def test_splits_that_were_kept_are_those_that_are_worked_out_anew() -> None:
    base = sample_case(passes=5, layers=3, experts=24, ranks=RANKS, seed=21)
    other = Ranks.uniform(ranks=8, slots_per_rank=5, ranks_per_node=2)
    cases = {
        "base": base,
        "nodes": replace(base, ranks=other),
        "seed": replace(base, seed=5),
        "loads": replace(base, load_PLE=base.load_PLE + 7.0),
    }
    for rule in SPLITS:
        # All are asked for first, so that the second time finds what the first one kept.
        for _ in range(2):
            loads = {name: expected_loads(rule, case) for name, case in cases.items()}
            sampled = {name: sampled_loads(rule, case) for name, case in cases.items()}
        for name, case in cases.items():
            sampling._lp_shares.cache_clear()
            launches.launched_shares.cache_clear()
            alone = np.concatenate(
                [expected_loads(rule, replace(case, load_PLE=one[None])) for one in case.load_PLE]
            )
            assert np.allclose(alone, loads[name], rtol=1e-12), (rule, name, "expected")
            assert np.array_equal(sampled_loads(rule, case), sampled[name]), (rule, name, "sampled")
    distinct = {name: sampled_loads("static", cases[name]) for name in ("base", "nodes")}
    assert not np.allclose(distinct["base"], distinct["nodes"])
