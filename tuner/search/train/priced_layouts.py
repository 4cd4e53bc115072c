"""Search and pricing of a pool's layouts, for decisions that compare numbers of nodes."""

from dataclasses import dataclass
from typing import Protocol

from tuner.config.candidates import strategies_of
from tuner.config.train import TrainDecision
from tuner.errors import SpecError
from tuner.faults.reliability import FailureModel, Jobs
from tuner.search.settings import SearchSettings
from tuner.search.train.build_problem import PricedPool, build_problem
from tuner.search.train.degrees import legal_degrees
from tuner.search.train.plan_fields import failure_model
from tuner.search.train.search import search
from tuner.search.train.search_result import solution_fields
from tuner.spec.cluster import Pool
from tuner.spec.spec import Spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Fastest:
    """The fastest layout that a search has found."""

    step_s: float
    decision: TrainDecision


class PricedLayouts(Protocol):
    """A pool with the search and prices of its layouts."""

    @property
    def pool(self) -> Pool:
        """The pool."""
        ...

    def fastest(self, spec: Spec, settings: SearchSettings) -> Fastest | None:
        """Find the fastest layout of a spec; None: none is legal, none fits, or all are slower."""
        ...

    def failure_model(
        self, spec: Spec, decision: TrainDecision
    ) -> tuple[Jobs, FailureModel | None]:
        """Jobs of one decision that can fail, and how often they do."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticLayouts:
    """Layouts that the analytic model prices."""

    priced_pool: PricedPool

    @property
    def pool(self) -> Pool:
        """The pool."""
        return self.priced_pool.pool

    def fastest(self, spec: Spec, settings: SearchSettings) -> Fastest | None:
        """Search for it."""
        try:
            problem = build_problem(spec, self.priced_pool)
        except SpecError:
            return None
        if not legal_degrees(problem).num_legal:
            return None
        outcome = search(problem, settings)
        if outcome.solutions is None:
            return None
        return Fastest(
            step_s=float(outcome.solutions.step_s[0]),
            decision=TrainDecision.model_validate(solution_fields(outcome, 0)),
        )

    def failure_model(
        self, spec: Spec, decision: TrainDecision
    ) -> tuple[Jobs, FailureModel | None]:
        """Rest on the pool's datasheet and profile."""
        goal = spec.goal
        strategies = strategies_of(
            decision, sequence_length=goal.sequence_length, global_batch_size=goal.global_batch_size
        )
        return failure_model(spec, self.priced_pool, strategies)
