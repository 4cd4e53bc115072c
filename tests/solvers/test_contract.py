"""Every method of every registered family keeps its family's contract (contract.py)."""

from typing import Any

import pytest

from solvers import registry
from solvers.errors import RejectedClaimError, UnknownSolverError
from solvers.family import Family
from solvers.result import Claim, Status
from tests.solvers.contract import (
    GRACE_S,
    LONG_S,
    SHORT_S,
    Contract,
    are_equal,
    bound_breaches,
    breaches,
    shown,
)
from tests.solvers.instances.contract import INSTANCES
from tests.solvers.layout.contract import LAYOUT
from tests.solvers.partition.contract import PARTITION
from tests.solvers.placement.balance.contract import BALANCE
from tests.solvers.placement.chain.contract import CHAIN
from tests.solvers.placement.coactivation.contract import COACTIVATION
from tests.solvers.rank_placement.contract import RANK_PLACEMENT

CONTRACTS: tuple[Contract[Any, Any], ...] = (
    *(LAYOUT, PARTITION, RANK_PLACEMENT, INSTANCES),
    *(BALANCE, CHAIN, COACTIVATION),
)

every_family = pytest.mark.parametrize("contract", CONTRACTS, ids=lambda each: each.family.name)
every_method = pytest.mark.parametrize(
    ("contract", "method"),
    [
        pytest.param(contract, method, id=f"{contract.family.name}-{method}")
        for contract in CONTRACTS
        for method in contract.family.methods
    ],
)
every_bound = pytest.mark.parametrize(
    "contract",
    [contract for contract in CONTRACTS if contract.bound is not None],
    ids=lambda each: each.family.name,
)


def test_every_registered_family_has_a_contract() -> None:
    families = {id(value) for value in vars(registry).values() if isinstance(value, Family)}
    assert families == {id(contract.family) for contract in CONTRACTS}


@every_method
def test_meets_the_oracle(contract: Contract[Any, Any], method: str) -> None:
    assert breaches(contract, method, contract.first) == []


@pytest.mark.slow
@every_method
def test_meets_the_oracle_on_every_seed(contract: Contract[Any, Any], method: str) -> None:
    assert breaches(contract, method, contract.rest()) == []


@every_bound
def test_no_optimum_is_below_the_bound(contract: Contract[Any, Any]) -> None:
    assert bound_breaches(contract, range(contract.count)) == []


@every_family
def test_the_first_instances_show_every_feature(contract: Contract[Any, Any]) -> None:
    assert len({*contract.first}) >= 8
    seen = shown(contract, contract.first)
    assert min(seen.values()) >= 1, seen


@pytest.mark.slow
@every_family
def test_several_instances_show_every_feature(contract: Contract[Any, Any]) -> None:
    seen = shown(contract, range(contract.count))
    assert min(seen.values()) >= contract.often, seen


@every_method
def test_the_time_limit_is_kept(contract: Contract[Any, Any], method: str) -> None:
    outcome = contract.family.solve(contract.large(), method=method, time_limit_s=SHORT_S)
    assert outcome.solve_s < GRACE_S
    assert outcome.status in contract.hurried[method]
    if outcome.status is Status.FEASIBLE:
        assert outcome.bound < outcome.objective * (1.0 - 1e-6)
        assert outcome.bound > 0.0


@every_method
def test_equal_instances_have_equal_solutions(contract: Contract[Any, Any], method: str) -> None:
    problem = contract.instance(contract.solved_seed(method))
    one, two = (
        contract.family.solve(problem, method=method, time_limit_s=LONG_S).solution
        for _ in range(2)
    )
    assert are_equal(one, two)


@every_family
def test_false_claims_are_refused(contract: Contract[Any, Any]) -> None:
    seed = contract.solved_seed(contract.family.default)
    problem, best = contract.instance(seed), contract.best(seed)
    for solution, bound, complaint in (
        (contract.broken(problem, best.solution), 0.0, "claims a solution that is not allowed"),
        (best.solution, best.objective * 1.001, "claims that nothing is below"),
    ):
        claim = Claim(status=Status.FEASIBLE, solution=solution, bound=bound)
        with pytest.raises(RejectedClaimError, match=f"lie {complaint}"):
            contract.family.checked(problem, claim, method="lie", solve_s=0.0)


@every_family
def test_an_unknown_method_is_answered_with_the_known_ones(contract: Contract[Any, Any]) -> None:
    family = contract.family
    known = f"{family.name} method 'guess' is not one of {', '.join(family.methods)}"
    with pytest.raises(UnknownSolverError, match=known):
        family.solve(contract.instance(0), method="guess", time_limit_s=1.0)
