"""The search for a placement: solve, choose the dispatch rule, score, all within one deadline.

The dispatch rule is chosen once, on a first placement. If it differs from the rule that placement
was solved for, a second search runs under the chosen rule. Time for linear programs is reserved
(`deadline.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from solvers.placement.balance.problem import Migration, ReplicaDispatch
from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Placement
from solvers.result import Outcome
from tuner.search.place.candidates import (
    EplbBaseline,
    eplb_baseline,
    layer_time_candidates,
    node_local_replicas,
    policies,
    solve_objective,
    solved_dispatch,
)
from tuner.search.place.cost import active_load_of
from tuner.search.place.deadline import (
    MIN_LP_S,
    limit_fit_passes,
    pass_seconds,
)
from tuner.search.place.dispatch_choice import allowed_rules, choose_dispatch
from tuner.search.place.evidence import WorkloadEvidence, mean_load_LE
from tuner.search.place.links import LinkCosts
from tuner.search.place.methods import merge_candidates
from tuner.search.place.prices import Pricing
from tuner.search.place.selection import CandidateScores, score_candidates
from tuner.search.settings import Deadline
from tuner.spec.place import Objective
from tuner.spec.place_method import Method
from tuner.spec.place_read import PlaceSpec

OTHERS_SHARE: Final = 0.4
"""Share of the main search's time for further candidates of objective layer_time."""

LEAST_RATIO: Final = 0.05
"""Share of the time limit that the main search has in any case."""

MAX_SCORED: Final = 8
"""About how many placements a linear program is solved for on each fit pass: the candidates, the
chosen one (to choose its dispatch rule)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeShares:
    """Shares of the time limit; evaluation takes what is left."""

    main: float
    """The main search."""
    second_search: float
    """The search under another dispatch rule, where the first placement shows that to be best."""
    leave_one_out: float
    """Plans without each workload in turn."""
    scoring: float = 0.0
    """Linear programs of the fit passes."""


PLAIN: Final = TimeShares(main=0.5, second_search=0.15, leave_one_out=0.15)
PROGRAMS: Final = TimeShares(
    main=0.3,
    second_search=0.1,
    leave_one_out=0.05,
    scoring=0.3,
)
"""Shares where linear programs may have to be solved, which takes longer than the search."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaceProblem:
    """The spec with everything that is known before the search."""

    spec: PlaceSpec
    evidence: tuple[WorkloadEvidence, ...]
    pricing: Pricing | None
    links: LinkCosts
    migration: Migration | None
    deadline: Deadline


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchResult:
    """The chosen placement with all candidates, and the dispatch rule it was solved for."""

    outcome: Outcome[Placement]
    baseline: EplbBaseline
    dispatch: str
    scores: CandidateScores
    scored_evidence: tuple[WorkloadEvidence, ...]
    """The evidence, limited to the fit passes that candidates were scored on."""
    shares: TimeShares
    pass_s: float
    """Seconds of the linear programs of one pass; 0: none is solved."""
    notes: tuple[str, ...]


def search(problem: PlaceProblem, *, dispatch: str) -> SearchResult | Outcome[Placement]:
    """Find the placement, or return the outcome of a search that found none.

    Args:
        problem: what to solve.
        dispatch: the rule to begin with.
    """
    spec, goal, ranks, deadline = (
        problem.spec,
        problem.spec.goal,
        problem.spec.ranks,
        problem.deadline,
    )
    shares, pass_s = _shares_of(problem, dispatch)
    scored_evidence = problem.evidence
    if pass_s:
        scored_evidence = limit_fit_passes(
            problem.evidence,
            placements=MAX_SCORED,
            pass_s=pass_s,
            time_s=max(deadline.share_s(shares.scoring), MIN_LP_S),
        )
    steps = _SearchSteps(problem=problem, scored_evidence=scored_evidence)
    baseline = steps.eplb_baseline(dispatch)
    is_layer_time = goal.objective is Objective.LAYER_TIME and goal.method is Method.AUTO
    others_share = shares.main * OTHERS_SHARE * is_layer_time
    # The main search has a minimum of time, however long the first steps took.
    allowed_s = max(deadline.share_s(shares.main - others_share), LEAST_RATIO * deadline.limit_s)
    outcome, candidates = steps.solve(baseline, dispatch, allowed_s)
    if outcome.solution is None:
        return outcome
    if is_layer_time and deadline.left_s > 0.0:
        candidates |= layer_time_candidates(
            problem.evidence,
            goal=goal,
            ranks=ranks,
            baseline=baseline,
            dispatch=dispatch,
            links=problem.links,
            migration=problem.migration,
            time_limit_s=deadline.share_s(others_share),
        )
    scores = steps.score_candidates(candidates, baseline, dispatch)
    choice = choose_dispatch(spec, scored_evidence, scores.chosen, planned=dispatch)
    if choice.rule != dispatch:
        # The rule is chosen once; placements are solved, scored and evaluated under it.
        needs_second = steps.searched_for(choice.rule) not in (None, steps.searched_for(dispatch))
        dispatch = choice.rule
        baseline = steps.eplb_baseline(dispatch)
        second_s = deadline.share_s(shares.second_search)
        if needs_second and second_s > 0.0:
            second_search, second_candidates = steps.solve(baseline, dispatch, second_s)
            if second_search.solution is not None:
                candidates = merge_candidates(
                    candidates, second_candidates, goal=goal, dispatch=dispatch
                )
                outcome = second_search
        scores = steps.score_candidates(candidates, baseline, dispatch)
    return SearchResult(
        outcome=outcome,
        baseline=baseline,
        dispatch=dispatch,
        scores=scores,
        scored_evidence=scored_evidence,
        shares=shares,
        pass_s=pass_s if dispatch in PASS_BY_PASS else 0.0,
        notes=choice.notes,
    )


def _shares_of(problem: PlaceProblem, dispatch: str) -> tuple[TimeShares, float]:
    """Return the time shares, and the seconds of a pass where linear programs may be solved."""
    spec = problem.spec
    if spec.goal.is_about_traffic or not PASS_BY_PASS.intersection(
        (dispatch, *allowed_rules(spec))
    ):
        return PLAIN, 0.0
    baseline = policies(mean_load_LE(problem.evidence), ranks=spec.ranks, groups=None)["eplb"]
    clock = problem.deadline.clock
    pass_s = pass_seconds(problem.evidence, baseline, ranks=spec.ranks, clock=clock)
    return PROGRAMS, pass_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SearchSteps:
    """The steps of a search, under one dispatch rule and then another."""

    problem: PlaceProblem
    scored_evidence: tuple[WorkloadEvidence, ...]

    def eplb_baseline(self, dispatch: str) -> EplbBaseline:
        goal, ranks = self.problem.spec.goal, self.problem.spec.ranks
        return eplb_baseline(
            self.scored_evidence, ranks=ranks, groups=goal.expert_groups, dispatch=dispatch
        )

    def searched_for(self, dispatch: str) -> ReplicaDispatch | None:
        """Return the rule that a search places for; None: replicas on one node stand for it."""
        is_idle = (
            self.problem.spec.goal.objective is Objective.BALANCE
            and self.with_local_replicas({}, dispatch)
        )
        return None if is_idle else solved_dispatch(dispatch)

    def with_local_replicas(
        self, placements: Mapping[str, Placement], dispatch: str
    ) -> dict[str, Placement]:
        goal, evidence = self.problem.spec.goal, self.problem.evidence
        local = node_local_replicas(
            evidence, goal=goal, ranks=self.problem.spec.ranks, dispatch=dispatch
        )
        return (
            {**local} if local and goal.objective is Objective.BALANCE else {**placements, **local}
        )

    def solve(
        self, baseline: EplbBaseline, dispatch: str, time_limit_s: float
    ) -> tuple[Outcome[Placement], dict[str, Placement]]:
        problem, goal = self.problem, self.problem.spec.goal
        # EPLB's rule takes no time; what a search would take is left to evaluation.
        method = Method.EPLB if self.searched_for(dispatch) is None else goal.method
        outcome = solve_objective(
            problem.evidence,
            goal=goal.model_copy(update={"method": method}),
            ranks=problem.spec.ranks,
            baseline=baseline,
            dispatch=dispatch,
            links=problem.links,
            active_load=active_load_of(goal, problem.pricing),
            migration=problem.migration,
            time_limit_s=time_limit_s,
        )
        return outcome, {} if outcome.solution is None else {outcome.method: outcome.solution}

    def score_candidates(
        self, candidates: Mapping[str, Placement], baseline: EplbBaseline, dispatch: str
    ) -> CandidateScores:
        problem = self.problem
        return score_candidates(
            problem.spec,
            self.scored_evidence,
            self.with_local_replicas(candidates, dispatch),
            baseline,
            problem.pricing,
            problem.links,
            dispatch,
        )
