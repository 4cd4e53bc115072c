"""From the question to the placement: searches, the engine's rule, and weighing, by one deadline.

The rule is chosen once, on a first placement; where it is another than that one was made for, one
more is sought for it. What linear programs may take of the time is set aside (`deadline.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from solvers.placement.balance.problem import Migration
from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Placement
from solvers.result import Outcome
from tuner.planner.place.candidates import (
    Rule,
    beside_search,
    chain_problem,
    others_for_time,
    policies,
    rule_of,
    solve_objective,
    solved_dispatch,
)
from tuner.planner.place.cost import active_load_of
from tuner.planner.place.deadline import (
    LEAST_PROGRAMS_S,
    Deadline,
    fewer_planned,
    pass_seconds,
)
from tuner.planner.place.dispatch_choice import allowed_rules, choose_dispatch
from tuner.planner.place.evidence import WorkloadEvidence, mean_load_LE
from tuner.planner.place.folds import unseen_costs
from tuner.planner.place.known_table import counts_on_table, on_table
from tuner.planner.place.links import LinkCosts
from tuner.planner.place.methods import beside_automatic, is_automatic, under_another_rule
from tuner.planner.place.prices import Pricing
from tuner.planner.place.selection import Weighed, weigh
from tuner.spec.place import Objective
from tuner.spec.place_method import Method
from tuner.spec.place_read import PlaceSpec

OTHERS_SHARE: Final = 0.4
"""Of the main search's time, for placements that are priced beside it."""

LEAST_RATIO: Final = 0.05
"""Of the time limit, that the main search has in any case."""

MOST_WEIGHED: Final = 8
"""Placements that a linear program is solved for on each planned pass, about: those weighed, the
chosen one to choose its rule by and without near replicas, and one with more slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Of the time limit; judging takes what is left of it, and relaxations what that leaves."""

    main: float
    """For the plan itself."""
    again: float
    """For the same under another dispatch rule, where the first plan shows it to be the best."""
    unseen: float
    """For searches in halves of the planned passes, where methods are weighed on the others."""
    folds: float
    """For plans without each workload in turn."""
    weighing: float = 0.0
    """For linear programs of planned passes."""
    fold_programs: float = 0.0
    """For linear programs of the halves."""


PLAIN: Final = Shares(main=0.5, again=0.15, unseen=0.0, folds=0.15)
PROGRAMS: Final = Shares(
    main=0.3, again=0.1, unseen=0.05, folds=0.05, weighing=0.15, fold_programs=0.1
)
"""Where linear programs may have to be solved, which takes longer than the search."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Question:
    """What is asked, and what is known before a search."""

    spec: PlaceSpec
    evidence: tuple[WorkloadEvidence, ...]
    pricing: Pricing | None
    links: LinkCosts
    migration: Migration | None
    deadline: Deadline


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Searched:
    """What was found, and for which rule."""

    outcome: Outcome[Placement]
    candidates: Mapping[str, Placement]
    rule: Rule
    dispatch: str
    weighed: Weighed
    looked_at: tuple[WorkloadEvidence, ...]
    """The evidence with the planned passes that were weighed on."""
    shares: Shares
    pass_s: float
    """What the linear programs of one pass take; 0: none is solved."""
    over_s: float
    """What the main search took beyond its time."""
    notes: tuple[str, ...]


def search(asked: Question, *, dispatch: str) -> Searched | Outcome[Placement]:
    """Find the placement, or return what came of a search that found none.

    Args:
        asked: the question.
        dispatch: the rule to begin with.
    """
    spec, goal, ranks, deadline = asked.spec, asked.spec.goal, asked.spec.ranks, asked.deadline
    shares, pass_s = _shares_of(asked, dispatch)
    looked_at = asked.evidence
    if pass_s:
        looked_at = fewer_planned(
            asked.evidence,
            placements=MOST_WEIGHED,
            pass_s=pass_s,
            time_s=max(deadline.share_s(shares.weighing), LEAST_PROGRAMS_S),
        )
    look = _Look(asked=asked, looked_at=looked_at, shares=shares, pass_s=pass_s)
    rule = look.rule_of(dispatch)
    is_timed = goal.objective is Objective.LAYER_TIME and goal.method is Method.AUTO
    others_share = shares.main * OTHERS_SHARE * is_timed
    # Something is searched for, however long the first steps took.
    allowed_s = max(deadline.share_s(shares.main - others_share), LEAST_RATIO * deadline.limit_s)
    started_s = deadline.clock()
    outcome, candidates = look.solve(rule, dispatch, allowed_s)
    over_s = max(deadline.clock() - started_s - allowed_s, 0.0)
    if outcome.solution is None:
        return outcome
    if is_timed and deadline.left_s > 0.0:
        candidates |= others_for_time(
            asked.evidence,
            goal=goal,
            ranks=ranks,
            rule=rule,
            dispatch=dispatch,
            links=asked.links,
            migration=asked.migration,
            time_limit_s=deadline.share_s(others_share),
        )
    candidates |= look.beside(dispatch)
    weighed = look.weigh(candidates, rule, dispatch)
    choice = choose_dispatch(spec, looked_at, weighed.chosen, planned=dispatch)
    if choice.rule != dispatch:
        # The rule is chosen once; placements are made for it, weighed and judged under it.
        is_again = solved_dispatch(choice.rule) != solved_dispatch(dispatch)
        dispatch = choice.rule
        rule = look.rule_of(dispatch)
        again_s = deadline.share_s(shares.again)
        if is_again and again_s > 0.0:
            again, found = look.solve(rule, dispatch, again_s)
            if again.solution is not None:
                candidates = under_another_rule(candidates, found, goal=goal, dispatch=dispatch)
                outcome = again
        candidates |= look.beside(dispatch)
        weighed = look.weigh(candidates, rule, dispatch)
    return Searched(
        outcome=outcome,
        candidates=candidates,
        rule=rule,
        dispatch=dispatch,
        weighed=weighed,
        looked_at=looked_at,
        shares=shares,
        pass_s=pass_s if dispatch in PASS_BY_PASS else 0.0,
        over_s=over_s,
        notes=choice.notes,
    )


def _shares_of(asked: Question, dispatch: str) -> tuple[Shares, float]:
    """Return how the time is shared, and the seconds of a pass where programs may be solved."""
    spec = asked.spec
    if spec.goal.is_about_traffic or not PASS_BY_PASS.intersection(
        (dispatch, *allowed_rules(spec))
    ):
        return PLAIN, 0.0
    rule = policies(mean_load_LE(asked.evidence), ranks=spec.ranks, groups=None)["eplb"]
    clock = asked.deadline.clock
    pass_s = pass_seconds(asked.evidence, rule, ranks=spec.ranks, clock=clock)
    return PROGRAMS, pass_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Look:
    """The steps of a search that are taken under one rule and then another."""

    asked: Question
    looked_at: tuple[WorkloadEvidence, ...]
    shares: Shares
    pass_s: float

    def rule_of(self, dispatch: str) -> Rule:
        goal, ranks = self.asked.spec.goal, self.asked.spec.ranks
        return rule_of(self.looked_at, ranks=ranks, groups=goal.expert_groups, dispatch=dispatch)

    def beside(self, dispatch: str) -> dict[str, Placement]:
        goal, ranks = self.asked.spec.goal, self.asked.spec.ranks
        return beside_search(self.asked.evidence, goal=goal, ranks=ranks, dispatch=dispatch)

    def solve(
        self, rule: Rule, dispatch: str, time_limit_s: float
    ) -> tuple[Outcome[Placement], dict[str, Placement]]:
        goal = self.asked.spec.goal
        chain = None
        if goal.objective is Objective.LAYER_CHAIN:
            chain = chain_problem(
                self.asked.evidence,
                goal=goal,
                ranks=self.asked.spec.ranks,
                rule=rule,
                links=self.asked.links,
            )
        by = partial(self._objective(rule, dispatch), self.asked.evidence, dispatch=dispatch)
        return beside_automatic(
            by, goal=goal, time_limit_s=time_limit_s, is_same=is_automatic(goal.method, chain)
        )

    def weigh(self, candidates: Mapping[str, Placement], rule: Rule, dispatch: str) -> Weighed:
        asked, deadline = self.asked, self.asked.deadline
        unseen = unseen_costs(
            asked.spec,
            asked.evidence,
            self._objective(rule, dispatch),
            dispatch,
            time_limit_s=deadline.share_s(self.shares.unseen),
            passes_s=max(deadline.share_s(self.shares.fold_programs), LEAST_PROGRAMS_S),
            pass_s=self.pass_s,
        )
        return weigh(
            asked.spec,
            self.looked_at,
            candidates,
            rule,
            asked.pricing,
            asked.links,
            dispatch,
            unseen,
        )

    def _objective(self, rule: Rule, dispatch: str) -> "partial[Outcome[Placement]]":
        asked = self.asked
        return partial(
            solve_objective,
            ranks=asked.spec.ranks,
            rule=rule,
            links=asked.links,
            active_load=active_load_of(asked.spec.goal, asked.pricing),
            migration=asked.migration,
            on_table=on_table if counts_on_table(asked.spec, dispatch) else None,
        )
