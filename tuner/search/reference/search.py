"""Exact search over all legal degrees: branch and bound outside, a solver of layouts inside.

Each legal combination of degrees is a candidate with its own layout problem. Candidates are solved
in the order of their lower bounds. Once a bound exceeds the threshold (the K best and every tie of
the best), the rest is proven worse and pruned, so that

    space = priced (solved, feasible or proven infeasible) + bounded + illegal + open

where `open` has no verdict: time ran out, or the method does not cover it. The smallest bound of
what is open or solved is the bound of the whole search.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from solvers.layout.patterns import least_objective_s
from solvers.layout.problem import Layout, LayoutProblem
from solvers.registry import LAYOUT
from solvers.result import Outcome, Status
from tuner.catalog.manifest import Capabilities
from tuner.config.train import TrainDecision
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.plans.train import Certificate, Space
from tuner.search.layout_groups import layout_of, rows_of_layouts
from tuner.search.reference.decisions import decode
from tuner.search.reference.layer_costs import CandidateCosts, PricedMachine, layout_problem
from tuner.search.reference.options import RecomputeOption, options
from tuner.search.reference.predict import band_around, predict
from tuner.search.reference.space import Enumeration, enumerate_degrees
from tuner.search.settings import Deadline, SearchSettings
from tuner.search.to_plan import certify
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
    bound_s: float
    """No layout of these degrees is faster."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceOutcome:
    """SolvedCandidate candidates, best first, and what is proven about them."""

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
    begun = settings.begin()
    enumeration = enumerate_degrees(
        work,
        num_devices=machine.num_devices,
        capabilities=capabilities,
        search=limits,
        ranks_per_node=machine.ranks_per_node,
    )
    stage_options = options(
        has_experts=work.model.moe is not None, capabilities=capabilities, search=limits
    )
    candidates = _candidates(work, machine, enumeration.legal, stage_options, capabilities)
    run = _BranchAndBound(
        settings=settings,
        machine=machine,
        stage_options=stage_options,
        capabilities=capabilities,
        begun=begun,
    )
    for candidate in candidates:
        run.visit(candidate)
    solutions = tuple(sorted(run.solved, key=_reproducible_order))
    return ReferenceOutcome(
        solved=solutions,
        infeasible=tuple(run.infeasible),
        enumeration=enumeration,
        certificate=run.certificate(solutions, enumeration),
    )


def _candidates(
    work: Workload,
    machine: PricedMachine,
    legal: Sequence[StepDegrees],
    stage_options: Sequence[RecomputeOption],
    capabilities: Capabilities,
) -> list[Candidate]:
    candidates = []
    for degrees in legal:
        costs = CandidateCosts(work=work, degrees=degrees, machine=machine)
        problem = layout_problem(costs, options=stage_options, capabilities=capabilities)
        candidates.append(
            Candidate(costs=costs, problem=problem, bound_s=least_objective_s(problem))
        )
    return sorted(candidates, key=lambda candidate: candidate.bound_s)


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


class _BranchAndBound:
    """The state of one search; lives for one call."""

    def __init__(
        self,
        *,
        settings: SearchSettings,
        machine: PricedMachine,
        stage_options: Sequence[RecomputeOption],
        capabilities: Capabilities,
        begun: Deadline,
    ) -> None:
        self._settings = settings
        self._machine = machine
        self._stage_options = stage_options
        self._capabilities = capabilities
        self._begun = begun
        self._deadline = settings.begin()
        """The limit begins when all candidates are priced."""
        self._visited = False
        self.solved: list[SolvedCandidate] = []
        self.infeasible: list[Candidate] = []
        self._bounded = 0
        self._open = 0
        self._open_bounds_s: list[float] = []
        """Bounds of what is not proven: out of time, or solved without proof."""

    def visit(self, candidate: Candidate) -> None:
        """Solve a candidate, unless its bound or the time limit excludes it."""
        if candidate.bound_s > self._threshold_s():
            self._bounded += 1
            return
        if self._visited and not self._deadline.left_s:
            self._open += 1
            self._open_bounds_s.append(candidate.bound_s)
            return
        self._visited = True
        outcome = self._solve(candidate.problem)
        if self._excess_bytes(candidate, outcome) > 0:
            safe = self._solve_until_it_fits(candidate, self._safe_problem(candidate))
            outcome = self._bounded_by(safe, outcome)
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
            time_limit_s=max(self._deadline.left_s, SHORTEST_SOLVE_S),
        )

    def _excess_bytes(self, candidate: Candidate, outcome: Outcome[Layout]) -> int:
        """Bytes above the limit, of a moment that the problem left out or of differing chunks."""
        if outcome.solution is None:
            return 0
        decision = decode(candidate.costs.degrees, outcome.solution, self._stage_options)
        peak_bytes = max(predict(candidate.costs, decision).peak_memory_bytes)
        return peak_bytes - self._machine.memory_limit_bytes

    def _safe_problem(self, candidate: Candidate) -> LayoutProblem:
        return layout_problem(
            candidate.costs,
            options=self._stage_options,
            capabilities=self._capabilities,
            uniform_chunks=False,
        )

    def _bounded_by(self, safe: Outcome[Layout], relaxed: Outcome[Layout]) -> Outcome[Layout]:
        """Keep the layout that surely fits, under the bound of the relaxed problem."""
        if safe.solution is None:
            return replace(safe, status=Status.UNKNOWN, bound=relaxed.bound)
        is_proven = safe.objective <= relaxed.bound * (1.0 + 1e-9)
        status = Status.OPTIMAL if is_proven else Status.FEASIBLE
        return replace(safe, status=status, bound=min(relaxed.bound, safe.objective))

    def certificate(
        self, solutions: Sequence[SolvedCandidate], enumeration: Enumeration
    ) -> Certificate:
        """State what is proven."""
        bounds_s = [*self._open_bounds_s, *(solution.bound_s for solution in solutions)]
        return certify(
            Space(
                priced=len(self.solved) + len(self.infeasible),
                bounded=self._bounded,
                illegal=enumeration.num_illegal,
                open=self._open,
            ),
            objective_s=solutions[0].objective_s if solutions else None,
            bound_s=min(bounds_s, default=math.inf),
            within_band=sum(solution.objective_s <= self._tie_s() for solution in solutions[1:]),
            solve_s=self._begun.elapsed_s,
            method=LAYOUT.default,
        )

    def _record(self, candidate: Candidate, outcome: Outcome[Layout]) -> None:
        if outcome.status is Status.INFEASIBLE:
            self.infeasible.append(candidate)
            return
        if outcome.solution is None:
            self._open += 1
            self._open_bounds_s.append(max(outcome.bound, candidate.bound_s))
            return
        decision = decode(candidate.costs.degrees, outcome.solution, self._stage_options)
        self.solved.append(
            SolvedCandidate(
                costs=candidate.costs,
                decision=decision,
                objective_s=outcome.objective,
                bound_s=min(outcome.bound, outcome.objective),
            )
        )

    def _threshold_s(self) -> float:
        """Step time above which nothing is of interest.

        The slower one of the K-th best layout and of the ties with the best.
        """
        best = sorted(self.solved, key=lambda solved: solved.objective_s)
        rows = rows_of_layouts(
            (layout_of(solved.decision) for solved in best), top=self._settings.top
        )
        return math.inf if rows is None else max(best[rows - 1].objective_s, self._tie_s())

    def _tie_s(self) -> float:
        """The upper edge of the error band around the best."""
        best_s = min(solved.objective_s for solved in self.solved)
        return band_around(best_s, ratio=self._machine.residual.band_ratio)[1]
