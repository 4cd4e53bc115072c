"""Exact search over all legal degrees: branch and bound outside, a solver of layouts inside.

Each legal combination of degrees is a node of the driver (tuner/search/driver.py) and a candidate
with a layout problem. A candidate is priced once it is solved, feasible or proven infeasible. It
stays open where time runs out, or where the method does not cover it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from solvers.layout.patterns import least_objective_s
from solvers.layout.problem import Layout, LayoutProblem
from solvers.registry import LAYOUT
from solvers.result import Outcome, Status
from tuner.catalog.manifest import Capabilities
from tuner.config.train import TrainDecision
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.plans.train import Certificate
from tuner.search.driver import ONE_BY_ONE, BestFirst
from tuner.search.layout_groups import layout_of
from tuner.search.reference.decisions import RecomputeOption, decode, options
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine, layout_problem
from tuner.search.reference.predict import band_around, predict
from tuner.search.reference.space import Enumeration, enumerate_degrees
from tuner.search.settings import SearchSettings
from tuner.spec.search import Search

SHORTEST_SOLVE_S = 0.1
"""The candidate of the best bound is always solved; one solved twice may exceed the limit."""

MOST_TIGHTENINGS = 8
"""Problems solved in place of one whose layouts need more memory than it counts."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """Legal degrees with their problem and the least time they can take."""

    costs: CandidateCosts
    problem: LayoutProblem
    bound_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SolvedCandidate:
    """A candidate with its best layout."""

    costs: CandidateCosts
    decision: TrainDecision
    objective_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceOutcome:
    """Solved candidates, best first, and what is proven about them."""

    solved: tuple[SolvedCandidate, ...]
    infeasible: tuple[Candidate, ...]
    """Candidates that fit in no layout."""
    enumeration: Enumeration
    certificate: Certificate


def search(
    work: Workload,
    machine: PricedMachine,
    *,
    capabilities: Capabilities,
    limits: Search,
    settings: SearchSettings,
) -> ReferenceOutcome:
    """Find the fastest launchable decisions and prove how far from optimal they can be."""
    ties = band_around(1.0, ratio=machine.residual.band_ratio)[1] - 1.0
    stage_options = options(
        has_experts=work.model.moe is not None, capabilities=capabilities, search=limits
    )
    run = _Run(replace(settings, band_ratio=ties), machine, capabilities, stage_options)
    enumeration = enumerate_degrees(
        work,
        num_devices=machine.num_devices,
        capabilities=capabilities,
        search=limits,
        ranks_per_node=machine.ranks_per_node,
    )
    candidates = run.candidates(work, enumeration.legal)
    # The limit begins when all candidates are priced, and the best one is solved whatever the time.
    run.deadline = settings.begin()
    for candidate in candidates[:1]:
        run.visit(candidate)
    rest = candidates[1:]
    bound_s_N = np.array([candidate.bound_s for candidate in rest])
    for (index,) in run.best_first(bound_s_N, sizes=ONE_BY_ONE, count=len):
        run.visit(rest[index])
    solved = tuple(sorted(run.solved, key=_reproducible_order))
    proof = run.prove(legal=len(enumeration.legal), illegal=enumeration.num_illegal)
    return ReferenceOutcome(
        solved=solved,
        infeasible=tuple(run.infeasible),
        enumeration=enumeration,
        certificate=proof.certify(
            solved[0].objective_s if solved else None,
            within_band=sum(candidate.objective_s <= run.tie_s() for candidate in solved[1:]),
            method=LAYOUT.default,
        ),
    )


def _reproducible_order(solved: SolvedCandidate) -> tuple[float, tuple[int, ...]]:
    degrees = solved.costs.degrees
    # Equal times: less parallelism first, so that plans do not depend on the order of solving.
    return solved.objective_s, (
        degrees.pipeline,
        degrees.virtual_pipeline,
        degrees.tensor,
        degrees.expert,
        degrees.zero_stage,
        degrees.micro_batch_size,
        degrees.ranks_per_node or 0,
    )


class _Run(BestFirst):
    """The state of one search; lives for one call."""

    def __init__(
        self,
        settings: SearchSettings,
        machine: PricedMachine,
        capabilities: Capabilities,
        stage_options: Sequence[RecomputeOption],
    ) -> None:
        super().__init__(settings)
        self._machine = machine
        self._capabilities = capabilities
        self._stage_options = stage_options
        self.solved: list[SolvedCandidate] = []
        self.infeasible: list[Candidate] = []

    def candidates(self, work: Workload, legal: Sequence[StepDegrees]) -> list[Candidate]:
        """State the problem of all legal degrees, those of the lowest bounds first."""
        candidates = []
        for degrees in legal:
            costs = CandidateCosts(work=work, degrees=degrees, machine=self._machine)
            problem = self._problem(costs)
            candidates.append(
                Candidate(costs=costs, problem=problem, bound_s=least_objective_s(problem))
            )
        return sorted(candidates, key=lambda candidate: candidate.bound_s)

    def ranked(self) -> tuple[Sequence[float], Iterator[tuple[int, ...]]]:
        """Return the steps of the solutions and their layouts, fastest first."""
        self.solved.sort(key=lambda solved: solved.objective_s)
        steps_s = [solved.objective_s for solved in self.solved]
        return steps_s, (layout_of(solved.decision) for solved in self.solved)

    def visit(self, candidate: Candidate) -> None:
        """Solve a candidate."""
        outcome = self._solve(candidate.problem)
        if self._excess_bytes(candidate, outcome) > 0:
            safe = self._problem(candidate.costs, uniform_chunks=False)
            outcome = self._bounded_by(self._solve_until_it_fits(candidate, safe), outcome)
        self._record(candidate, outcome)

    def _solve_until_it_fits(self, candidate: Candidate, problem: LayoutProblem) -> Outcome[Layout]:
        """Solve with less and less memory, by twice as much each time, until the layout fits."""
        outcome = self._solve(problem)
        for turn in range(MOST_TIGHTENINGS):
            excess_bytes = self._excess_bytes(candidate, outcome)
            if excess_bytes <= 0:
                return outcome
            # The layout may stay well below the limit of the problem, which counts less.
            tighter_D = np.maximum(problem.memory_limit_bytes_D - (excess_bytes << turn), 0)
            problem = replace(problem, memory_limit_bytes_D=tighter_D)
            outcome = self._solve(problem)
        if self._excess_bytes(candidate, outcome) > 0:
            return replace(outcome, status=Status.UNKNOWN, solution=None, objective=math.inf)
        return outcome

    def _solve(self, problem: LayoutProblem) -> Outcome[Layout]:
        return LAYOUT.solve(
            problem,
            time_limit_s=max(self.deadline.left_s, SHORTEST_SOLVE_S),
        )

    def _excess_bytes(self, candidate: Candidate, outcome: Outcome[Layout]) -> int:
        """Bytes above the limit, of a moment that the problem left out or of differing chunks."""
        if outcome.solution is None:
            return 0
        decision = decode(candidate.costs.degrees, outcome.solution, self._stage_options)
        peak_bytes = max(predict(candidate.costs, decision).peak_memory_bytes)
        return peak_bytes - self._machine.memory_limit_bytes

    def _problem(self, costs: CandidateCosts, *, uniform_chunks: bool = True) -> LayoutProblem:
        return layout_problem(
            costs,
            options=self._stage_options,
            capabilities=self._capabilities,
            uniform_chunks=uniform_chunks,
        )

    def _bounded_by(self, safe: Outcome[Layout], relaxed: Outcome[Layout]) -> Outcome[Layout]:
        """Keep the layout that surely fits, under the bound of the relaxed problem."""
        if safe.solution is None:
            return replace(safe, status=Status.UNKNOWN, bound=relaxed.bound)
        is_proven = safe.objective <= relaxed.bound * (1.0 + 1e-9)
        status = Status.OPTIMAL if is_proven else Status.FEASIBLE
        return replace(safe, status=status, bound=min(relaxed.bound, safe.objective))

    def _record(self, candidate: Candidate, outcome: Outcome[Layout]) -> None:
        if outcome.status is Status.INFEASIBLE:
            self.priced += 1
            self.infeasible.append(candidate)
            return
        if outcome.solution is None:
            self.leave_open(1, max(outcome.bound, candidate.bound_s))
            return
        self.priced += 1
        self.bound_s = min(self.bound_s, outcome.bound)
        decision = decode(candidate.costs.degrees, outcome.solution, self._stage_options)
        self.solved.append(
            SolvedCandidate(costs=candidate.costs, decision=decision, objective_s=outcome.objective)
        )
