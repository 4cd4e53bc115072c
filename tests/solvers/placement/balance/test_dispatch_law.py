import ast
import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest

from solvers.errors import RejectedClaimError
from solvers.placement import single_check
from solvers.placement.balance import check, dispatch_law, objective, starts
from solvers.placement.balance.dispatch_law import assigned_counts, slot_ratios
from solvers.placement.balance.eplb import eplb
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.dispatch.nearest import near_shares
from solvers.placement.dispatch.sampling import even_split, expected_split
from solvers.placement.ranks import Floats, Placement, Ranks
from solvers.registry import BALANCE
from solvers.result import Claim, Status
from tests.expect import present
from tests.solvers.placement.dispatch import static
from tests.solvers.placement.dispatch.testing import sample_case

NODES = Ranks.uniform(ranks=16, slots_per_rank=5, ranks_per_node=4)
ONE_NODE = Ranks.uniform(ranks=8, slots_per_rank=9)
UNEQUAL = Ranks(
    slots_G=np.array([3, 2, 4, 3, 3, 5]), node_G=np.array([0, 0, 0, 1, 1, 2]), speed_G=np.ones(6)
)


def case_on(ranks: Ranks, *, seed: int, layers: int = 3) -> DispatchCase:
    return sample_case(
        passes=1, layers=layers, experts=3 * ranks.num_slots // 4, ranks=ranks, seed=seed
    )


def problem_of(case: DispatchCase, dispatch: ReplicaDispatch) -> BalanceProblem:
    return BalanceProblem(
        load_WLE=case.load_PLE.copy(), weight_W=np.ones(1), ranks=case.ranks, dispatch=dispatch
    )


def test_the_checker_shares_no_code_with_the_dispatch_rules() -> None:
    for module in (check, dispatch_law, single_check):
        tree = ast.parse(Path(present(module.__file__)).read_text())
        names = [
            name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom | ast.Import)
            for name in (
                [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else [alias.name for alias in node.names]
            )
        ]
        ours = {
            "solvers.placement.balance.problem",
            "solvers.placement.balance.dispatch_law",
            "solvers.placement.ranks",
            "solvers.placement.single",
            "solvers.placement.single_check",
        }
        assert not [name for name in names if name.startswith("solvers") and name not in ours]


def test_near_ranks_agree_with_the_independent_computation() -> None:
    for ranks in (NODES, ONE_NODE, UNEQUAL):
        for seed in range(4):
            case = case_on(ranks, seed=seed)
            ours_LS = slot_ratios(case.placement, ranks, seed=None, launches=1)[0]
            assert np.allclose(ours_LS, expected_split(case), atol=1e-12), (ranks.num_ranks, seed)


def test_launches_of_the_checker_expect_what_the_law_says() -> None:
    for ranks in (NODES, ONE_NODE, UNEQUAL):
        case = case_on(ranks, seed=1)
        (exact_LS,) = slot_ratios(case.placement, ranks, seed=None, launches=1)
        ratio_DLS = slot_ratios(case.placement, ranks, seed=3, launches=2000)
        error_LS = ratio_DLS.std(axis=0) / np.sqrt(2000)
        away_LS = np.abs(ratio_DLS.mean(axis=0) - exact_LS)
        assert not (away_LS > 5.0 * error_LS + 1e-12).any(), ranks.num_ranks


def test_places_of_one_stream_are_assigned_evenly_and_those_of_several_as_is_drawn() -> None:
    rng = np.random.default_rng(0)
    # 7 far ranks of one stream on 3 replicas: 3, 2 and 2 in some order, each as often the larger.
    whole_DR = assigned_counts(3, [7], rng=rng, launches=3000)
    assert set(map(tuple, whole_DR.tolist())) == {(3, 2, 2), (2, 3, 2), (2, 2, 3)}
    assert np.abs(whole_DR.mean(axis=0) - 7 / 3).max() < 0.05
    # Streams of 4 and 4 on 2 replicas: each stream gets 4 of 8 places, 4 of which are the first's:
    # hypergeometric, variance 4 * 1/2 * 1/2 * 4/7 each.
    parted_DR = assigned_counts(2, [4, 4], rng=rng, launches=20_000)
    assert (parted_DR.sum(axis=1) == 8).all()
    assert parted_DR[:, 0].var() == pytest.approx(2 * 4 / 7, rel=0.05)


def test_the_checker_agrees_with_the_engine_s_own_assignments() -> None:
    # The mean over its first seeds, streams that meet by their numbers included.
    for ranks, layers in ((NODES, 6), (ONE_NODE, 6), (UNEQUAL, 6)):
        case = case_on(ranks, seed=11, layers=layers)
        problem = problem_of(case, ReplicaDispatch.STATIC)
        mean = problem.mean_WL.sum()
        engine = [
            static.rank_loads(dataclasses.replace(case, seed=seed)).max(axis=2).sum() / mean
            for seed in range(64)
        ]
        error = np.hypot(
            np.std(engine, ddof=1) / np.sqrt(64), check.standard_error(problem, case.placement)
        )
        value = check.objective(problem, case.placement)
        assert abs(value - np.mean(engine)) <= 4.0 * error + 0.002 * value, (
            ranks.num_ranks,
            value,
            np.mean(engine),
            error,
        )


def _first_replica(case: DispatchCase, share_DLS: Floats) -> Floats:
    """All tokens of an expert to the first of its slots."""
    first_LS = [
        [list(expert_S).index(expert) == slot for slot, expert in enumerate(expert_S)]
        for expert_S in case.placement.expert_LS
    ]
    return np.broadcast_to(np.array(first_LS, dtype=float), share_DLS.shape)


def _near_ones_alone(case: DispatchCase, share_DLS: Floats) -> Floats:
    """Far ranks send what near ones have sent before, in proportion."""
    near_LS = near_shares(
        case.placement.expert_LS, ranks=case.ranks, num_experts=case.num_experts
    ).near_LS
    total_LE = np.zeros(case.copies_LE.shape)
    experts = (np.arange(case.num_layers)[:, None], case.placement.expert_LS)
    np.add.at(total_LE, experts, near_LS)
    return np.broadcast_to(near_LS / total_LE[experts], share_DLS.shape)


def _even_at_once(case: DispatchCase, share_DLS: Floats) -> Floats:
    """Equal shares of all replicas, near or far."""
    return np.broadcast_to(even_split(case), share_DLS.shape)


def claim_of(problem: BalanceProblem, placement: Placement) -> Claim[Placement]:
    value, error = starts.claimed(problem, placement)
    return Claim(
        status=Status.FEASIBLE,
        solution=placement,
        bound=-math.inf,
        objective=value,
        objective_error=error,
    )


def test_a_broken_sampler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_on(NODES, seed=2, layers=4)
    problem = problem_of(case, ReplicaDispatch.STATIC)
    # EPLB's rule leaves its replicas wherever there is a slot, so that most far ranks draw.
    placement = eplb(problem.load_WLE[0], ranks=NODES)
    BALANCE.checked(problem, claim_of(problem, placement), method="sampled", solve_s=0.0)
    refusals, kept = [], []
    drawn_DLS = objective.slot_shares(problem, placement, seed=0)
    placed = dataclasses.replace(case, placement=placement)
    for breakage in (_first_replica, _near_ones_alone, _even_at_once):
        broken_DLS = breakage(placed, drawn_DLS)
        with monkeypatch.context() as patch:
            patch.setattr(objective, "launched_shares", lambda *_, of=broken_DLS, **__: of)
            try:
                BALANCE.checked(problem, claim_of(problem, placement), method="broken", solve_s=0.0)
            except RejectedClaimError as error:
                refusals.append(str(error))
            else:
                kept.append(breakage.__name__)
    assert not kept
    assert all("takes its solution to cost" in line for line in refusals)


def test_a_broken_expectation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_on(NODES, seed=2, layers=4)
    problem = problem_of(case, ReplicaDispatch.NEAR)
    placement = eplb(problem.load_WLE[0], ranks=NODES)
    BALANCE.checked(problem, claim_of(problem, placement), method="expected", solve_s=0.0)
    actual = starts.solve(problem, time_limit_s=0.05)
    assert actual.objective == starts.claimed(problem, present(actual.solution))[0]

    shares = near_shares(placement.expert_LS, ranks=NODES, num_experts=problem.num_experts)
    even_LS = even_split(dataclasses.replace(case, placement=placement))
    broken = dataclasses.replace(shares, mean_LS=even_LS)
    monkeypatch.setattr(objective, "near_shares", lambda *_, **__: broken)
    claim = claim_of(problem, placement)
    with pytest.raises(RejectedClaimError, match="its check finds"):
        BALANCE.checked(problem, claim, method="broken", solve_s=0.0)
