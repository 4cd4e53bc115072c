import dataclasses
import inspect
import tomllib
from pathlib import Path
from typing import Any

import pytest

from solvers import registry
from solvers.errors import RejectedClaimError
from solvers.family import Family
from solvers.layout.check import violations
from solvers.layout.problem import Layout, LayoutProblem
from solvers.registry import LAYOUT
from solvers.result import Claim, Status
from tests.expect import present
from tests.solvers.layout.testing import large_problem


@pytest.fixture(scope="module")
def problem() -> LayoutProblem:
    return large_problem()


@pytest.fixture(scope="module")
def true_claim(problem: LayoutProblem) -> Claim[Layout]:
    return LAYOUT.solver("exact")(problem, time_limit_s=60.0)


def tampered(claim: Claim[Layout], stage: int, layers_R: tuple[int, ...]) -> Claim[Layout]:
    layers_SR = list(present(claim.solution).layers_SR)
    layers_SR[stage] = layers_R
    layout = Layout(layers_SR=tuple(layers_SR), option_S=present(claim.solution).option_S)
    return Claim(status=claim.status, solution=layout, bound=claim.bound)


def test_a_true_claim_becomes_an_outcome(problem: LayoutProblem, true_claim: Claim[Layout]) -> None:
    outcome = LAYOUT.checked(problem, true_claim, method="exact", solve_s=0.25)
    assert outcome.status is Status.OPTIMAL
    assert outcome.objective == pytest.approx(true_claim.bound)
    assert (outcome.method, outcome.solve_s) == ("exact", 0.25)


def test_a_tampered_layout_is_rejected(problem: LayoutProblem, true_claim: Claim[Layout]) -> None:
    for stage, layers_R, complaint in (
        (4, (0, 1), "run 1 has 58 layers"),
        (4, (1, 4), "stage 4 holds run 0 after run 1 began"),
        (0, (3, 20), "device 0 needs"),
    ):
        claim = tampered(true_claim, stage, layers_R)
        assert any(complaint in line for line in violations(problem, present(claim.solution)))
        with pytest.raises(RejectedClaimError, match="lie claims a solution that is not allowed"):
            LAYOUT.checked(problem, claim, method="lie", solve_s=0.0)


def test_a_bound_above_the_objective_is_rejected(
    problem: LayoutProblem, true_claim: Claim[Layout]
) -> None:
    for factor in (
        1.0001,
        float("inf"),
        float("nan"),
    ):
        claim = Claim(
            status=Status.FEASIBLE, solution=true_claim.solution, bound=true_claim.bound * factor
        )
        with pytest.raises(RejectedClaimError, match="lie claims"):
            LAYOUT.checked(problem, claim, method="lie", solve_s=0.0)


def test_an_objective_that_the_check_does_not_find_is_rejected(
    problem: LayoutProblem, true_claim: Claim[Layout]
) -> None:
    said = dataclasses.replace(true_claim, objective=true_claim.bound)
    assert LAYOUT.checked(problem, said, method="exact", solve_s=0.0).status is Status.OPTIMAL
    for factor in (0.999, 1.001, float("nan")):
        lie = dataclasses.replace(true_claim, objective=true_claim.bound * factor)
        with pytest.raises(RejectedClaimError, match="takes its solution to cost"):
            LAYOUT.checked(problem, lie, method="lie", solve_s=0.0)
    # A mean over draws may be off by some of its standard errors.
    drawn = dataclasses.replace(
        true_claim, objective=true_claim.bound * 1.001, objective_error=true_claim.bound * 0.001
    )
    assert LAYOUT.checked(problem, drawn, method="drawn", solve_s=0.0).status is Status.OPTIMAL


def test_an_optimum_without_proof_is_only_feasible(
    problem: LayoutProblem, true_claim: Claim[Layout]
) -> None:
    claim = Claim(
        status=Status.OPTIMAL, solution=true_claim.solution, bound=true_claim.bound * 0.99
    )
    outcome = LAYOUT.checked(problem, claim, method="boast", solve_s=0.0)
    assert outcome.status is Status.FEASIBLE
    assert outcome.gap_ratio == pytest.approx(0.01)


def test_a_time_limit_must_be_positive(problem: LayoutProblem) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        LAYOUT.solve(problem, time_limit_s=0.0)


def test_the_clock_times_the_solve(problem: LayoutProblem) -> None:
    ticks = iter([10.0, 12.5])
    assert LAYOUT.solve(problem, time_limit_s=60.0, clock=lambda: next(ticks)).solve_s == 2.5


FAMILIES: tuple[Family[Any, Any], ...] = tuple(
    value for value in vars(registry).values() if isinstance(value, Family)
)


def test_every_entry_of_every_family_names_a_solver() -> None:
    for family in FAMILIES:
        for method in family.methods:
            parameters = inspect.signature(family.solver(method)).parameters
            assert [*parameters][1:] == ["time_limit_s", "threads"], (family.name, method)


def test_a_default_must_be_a_method() -> None:
    with pytest.raises(ValueError, match="'simplex' is not one of exact"):
        dataclasses.replace(LAYOUT, default="simplex")


def test_a_method_that_nobody_names_is_the_default(problem: LayoutProblem) -> None:
    assert LAYOUT.solve(problem, time_limit_s=60.0).method == LAYOUT.default


def test_highspy_is_not_a_dependency() -> None:
    # It carries the same HiGHS symbols as OR-Tools: both in one process fail to load or crash.
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    required = [*project["dependencies"], *(name for extra in extras for name in extra)]
    assert required
    assert not [name for name in required if "highs" in name.lower()]
