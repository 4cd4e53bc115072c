import ast
import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from solvers.errors import RejectedClaimError
from solvers.placement.balance import check, dispatch_law, starts
from solvers.placement.balance.dispatch_law import assigned_counts, expected_ratios, launched_ratios
from solvers.placement.balance.eplb import eplb
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.dispatch import launches, nearest
from solvers.placement.dispatch.case import DispatchCase
from solvers.placement.ranks import Floats, Ints, Placement, Ranks
from solvers.registry import BALANCE
from solvers.result import Claim, Status
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
    for module in (check, dispatch_law):
        assert module.__file__ is not None
        tree = ast.parse(Path(module.__file__).read_text())
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
        }
        assert not [name for name in names if name.startswith("solvers") and name not in ours]


def test_near_ranks_agree_with_the_independent_computation() -> None:
    off = []
    for ranks in (NODES, ONE_NODE, UNEQUAL):
        for seed in range(4):
            case = case_on(ranks, seed=seed)
            theirs = nearest.expected_split(case)
            for layer, expert, ratios in expected_ratios(case.placement, ranks):
                if not np.allclose(ratios, theirs[layer, expert], atol=1e-12):
                    off.append((ranks.num_ranks, seed, layer, expert))
    assert not off


def test_launches_of_the_checker_expect_what_the_law_says() -> None:
    off = []
    for ranks in (NODES, ONE_NODE, UNEQUAL):
        case = case_on(ranks, seed=1)
        exact = {
            (layer, expert): of for layer, expert, of in expected_ratios(case.placement, ranks)
        }
        for layer, expert, ratio_DG in launched_ratios(
            case.placement, ranks, seed=3, launches=2000
        ):
            assert np.allclose(ratio_DG.sum(axis=1), 1.0)
            error_G = ratio_DG.std(axis=0) / np.sqrt(2000)
            away = np.abs(ratio_DG.mean(axis=0) - exact[layer, expert])
            if (away > 5.0 * error_G + 1e-12).any():
                off.append((ranks.num_ranks, layer, expert))
    assert not off


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
    off = []
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
        if abs(value - np.mean(engine)) > 4.0 * error + 0.002 * value:
            off.append((ranks.num_ranks, value, np.mean(engine), error))
    assert not off


def _first_replica(true: Callable[..., Iterator[tuple[int, int, Ints]]]) -> Callable[..., object]:
    def broken(placement: Placement, *, ranks: Ranks, **others: object) -> object:
        first = {
            (layer, expert): host_R[0]
            for layer, expert, host_R in launches.replicated(placement, ranks=ranks)
        }
        for layer, expert, target_DH in true(placement, ranks=ranks, **others):
            yield layer, expert, np.full_like(target_DH, first[layer, expert])

    return broken


def _one_replica_for_all(
    true: Callable[..., Iterator[tuple[int, int, Ints]]],
) -> Callable[..., object]:
    def broken(placement: Placement, **others: object) -> object:
        for layer, expert, target_DH in true(placement, **others):
            yield layer, expert, np.broadcast_to(target_DH[:, -1:], target_DH.shape)

    return broken


def _even_at_once(true: Callable[..., Iterator[tuple[int, int, Ints]]]) -> Callable[..., object]:
    def broken(placement: Placement, *, ranks: Ranks, **others: object) -> object:
        hosts = {
            (layer, expert): host_R
            for layer, expert, host_R in launches.replicated(placement, ranks=ranks)
        }
        for layer, expert, target_DH in true(placement, ranks=ranks, **others):
            turns_H = np.resize(hosts[layer, expert], target_DH.shape[1])
            yield layer, expert, np.broadcast_to(turns_H, target_DH.shape)

    return broken


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
    for breakage in (_first_replica, _one_replica_for_all, _even_at_once):
        with monkeypatch.context() as patch:
            patch.setattr(starts, "targets", breakage(launches.targets))
            try:
                claim = claim_of(problem, placement)
                BALANCE.checked(problem, claim, method="broken", solve_s=0.0)
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
    assert actual.solution is not None
    assert actual.objective == starts.claimed(problem, actual.solution)[0]

    def even(placement: Placement, *, ranks: Ranks) -> Iterator[tuple[int, int, Floats]]:
        for layer, expert, host_R in launches.replicated(placement, ranks=ranks):
            yield layer, expert, np.bincount(host_R, minlength=ranks.num_ranks) / len(host_R)

    monkeypatch.setattr(starts, "expected_shares", even)
    claim = claim_of(problem, placement)
    with pytest.raises(RejectedClaimError, match="its check finds"):
        BALANCE.checked(problem, claim, method="broken", solve_s=0.0)
