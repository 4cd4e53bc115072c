"""The search for a placement: solve, score candidates, choose the dispatch rule.

The dispatch rule is chosen once, on the best placement for the rule that the plan began with;
candidates are then scored under it, and not searched for again.

All searches and evaluations share one deadline. Searches have time limits, the steps between them
have none: almost all of their time goes to linear programs, one per layer, pass and placement, so
passes are limited to as many as fit, whatever the host's load.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from solvers.placement import single_check
from solvers.placement.balance.eplb import eplb
from solvers.placement.dispatch.sampling import PASS_BY_PASS
from solvers.placement.ranks import Placement
from solvers.result import Outcome
from tuner.errors import SpecError
from tuner.plans.place import LeftOut
from tuner.search.place.cost import evaluate_workload, fit_cost
from tuner.search.place.dispatch_choice import choose_dispatch, launch_refusal, offers_of
from tuner.search.place.evidence import Split, limit_passes, mean_load_LE
from tuner.search.place.problem import PlaceProblem, solve, traffic_problem
from tuner.spec.files import shown_path
from tuner.spec.place import Objective
from tuner.spec.place_method import Method

MAIN_SHARE: Final = 0.5
"""Share of the time limit for the main search; evaluation takes what is left."""
MAIN_BESIDE_PROGRAMS: Final = 0.2
"""The same where linear programs may have to be solved, which takes longer than the search."""
OTHERS_SHARE: Final = 0.4
"""Share of the main search's time for further candidates of objective layer_time."""
LEFT_OUT_SHARE: Final = 0.15
"""Share of the time limit for the plans without each workload in turn."""
PROGRAMS_SHARE: Final = 0.6
"""Share of the time limit for linear programs."""

PROGRAM_S: Final = 2e-5
"""Seconds of a linear program by slot of a layer: twice to three times those of one core of an EPYC
(58 layers of 160 slots, 75 ms a pass), for slower hosts and placements that take more rounds."""
MOST_EVALUATED: Final = 8
"""About how many placements a linear program is solved for on each fit or hold-out pass: the
candidates, the chosen one under another rule, and the plan without the workload."""

MOST_FOLDS: Final = 12
"""Workloads that are left out in turn."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """A placement scored on the fit passes."""

    name: str
    placement: Placement
    objective: float
    broken: str
    """The limit that it breaks; empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchResult:
    """Candidates of a search, under the rule that was chosen."""

    problem: PlaceProblem
    outcome: Outcome[Placement]
    candidates: tuple[Candidate, ...]
    """Best first; the goal's method first where it names one."""
    notes: tuple[str, ...]


def search(problem: PlaceProblem) -> SearchResult | Outcome[Placement]:
    """Find the placement, or return the outcome of a search that found none.

    Raises:
        SpecError: the goal cannot be solved, or no placement found can be launched.
    """
    spec, deadline = problem.spec, problem.deadline
    problem, notes = _within_deadline(problem)
    share = MAIN_BESIDE_PROGRAMS if _solves_programs(problem) else MAIN_SHARE
    is_time = spec.goal.objective is Objective.LAYER_TIME and spec.goal.method is Method.AUTO
    # Neither share counts what was read and timed before.
    main_s, others_s = (
        part * share * deadline.limit_s for part in (1.0 - OTHERS_SHARE * is_time, OTHERS_SHARE)
    )
    outcome = solve(problem, time_limit_s=main_s)
    if outcome.solution is None:
        return outcome
    placements = {outcome.method: outcome.solution}
    if is_time:
        placements |= layer_time_candidates(problem, time_limit_s=others_s)
    candidates = score(problem, placements)
    rule, unscored = choose_dispatch(problem, candidates[0].placement)
    if rule != problem.dispatch:
        problem = replace(problem, dispatch=rule)
        candidates = score(problem, placements)
    return SearchResult(
        problem=problem, outcome=outcome, candidates=candidates, notes=(*unscored, *notes)
    )


def _solves_programs(problem: PlaceProblem) -> bool:
    allowed = {offer.rule for offer, refusal in offers_of(problem.spec) if not refusal}
    rules = {problem.dispatch, *allowed} & PASS_BY_PASS
    return bool(rules) and not problem.spec.goal.is_about_traffic


def _within_deadline(problem: PlaceProblem) -> tuple[PlaceProblem, tuple[str, ...]]:
    """Keep as many passes as linear programs are solved for in time, with a note on the others."""
    if not _solves_programs(problem):
        return problem, ()
    layers, slots = problem.baseline.placement.expert_LS.shape
    each_s = PROGRAM_S * layers * slots * MOST_EVALUATED * len(problem.evidence)
    most_passes = int(PROGRAMS_SHARE * problem.deadline.limit_s / each_s)
    evidence = tuple(limit_passes(workload, most_passes) for workload in problem.evidence)
    cut = [
        f"{len(few.holdout_PLE)} of {len(workload.holdout_PLE)} passes of {workload.name!r}"
        for workload, few in zip(problem.evidence, evidence, strict=True)
        if len(few.holdout_PLE) < len(workload.holdout_PLE)
    ]
    note = (
        f"evaluated on {', '.join(cut)}, evenly spaced: no more linear programs fit in the time"
        " limit; give more with --time-limit"
    )
    return replace(problem, evidence=evidence), (note,) * bool(cut)


def layer_time_candidates(problem: PlaceProblem, *, time_limit_s: float) -> dict[str, Placement]:
    """Return candidates that the search for layer time misses, by name.

    The search models token copies and weight reads. Where the all-to-all dominates, the balance of
    copies alone counts; where a token is sent once per rank and domain, the number of ranks does.
    """
    spec = problem.spec
    objectives = {"balance of copies": Objective.BALANCE}
    is_single = problem.migration is None and spec.ranks.num_slots == spec.num_experts
    has_tokens = all(workload.fit_LTK is not None for workload in problem.evidence)
    if spec.goal.is_merged and is_single and has_tokens:
        objectives["co-activation"] = Objective.CO_ACTIVATION
    placements = {}
    for name, objective in objectives.items():
        goal = spec.goal.model_copy(update={"objective": objective})
        variant = replace(problem, spec=replace(spec, goal=goal))
        solved = solve(variant, time_limit_s=time_limit_s / len(objectives))
        if solved.solution is not None:
            placements[name] = solved.solution
    return placements


def score(problem: PlaceProblem, placements: Mapping[str, Placement]) -> tuple[Candidate, ...]:
    """Order the candidates, EPLB's and the current placement by cost; the goal's method first.

    Raises:
        SpecError: no placement found can be launched with the dispatch that the goal names.
    """
    spec, baseline = problem.spec, problem.baseline
    named = dict(placements)
    if problem.migration is None and spec.goal.method is not Method.EPLB:
        named[baseline.name] = baseline.placement
    ranks = spec.ranks
    can_split = ranks.num_nodes > 1 and spec.num_experts % ranks.num_nodes == 0
    is_uniform = (ranks.slots_G == ranks.slots_G[0]).all()
    if problem.dispatch == "near_lp" and problem.migration is None and can_split and is_uniform:
        # Near only to the ranks that hold them, so that the program steers all other tokens.
        named["replicas on one node"] = eplb(
            mean_load_LE(problem.evidence), ranks=ranks, num_groups=spec.num_experts
        )
    if spec.current.expert_LS.shape == baseline.placement.expert_LS.shape:
        named["as it runs"] = spec.current
    candidates = []
    for name, placement in named.items():
        broken = launch_refusal(problem, placement)
        if spec.goal.is_about_traffic:
            limits = single_check.violations(traffic_problem(problem), placement)
            broken = broken or next(iter(limits), "")
        candidate = Candidate(
            name=name, placement=placement, objective=fit_cost(problem, placement), broken=broken
        )
        candidates.append(candidate)
    method = spec.goal.method.value
    candidates.sort(
        key=lambda scored: (scored.name != method, bool(scored.broken), scored.objective)
    )
    if candidates[0].broken and not spec.goal.is_about_traffic:
        raise SpecError(f"{shown_path(spec.path)}: goal.dispatch: {candidates[0].broken}")
    return tuple(candidates)


def leave_one_out(problem: PlaceProblem) -> tuple[LeftOut, ...]:
    """Plan without each workload in turn and evaluate on all of its passes.

    Only the first `MOST_FOLDS` workloads, and as many as the time allows.
    """
    evidence, spec, deadline = problem.evidence, problem.spec, problem.deadline
    folds: list[LeftOut] = []
    limit_s = LEFT_OUT_SHARE * deadline.limit_s / min(len(evidence), MOST_FOLDS)
    for workload in evidence[: MOST_FOLDS * (len(evidence) > 1)]:
        others = tuple(kept for kept in evidence if kept is not workload)
        fold = replace(problem, evidence=others)
        if deadline.left_s <= 0.0:
            break
        solution = solve(fold, time_limit_s=min(limit_s, deadline.left_s)).solution
        if solution is None:
            continue
        before, rule, after = costs = [
            evaluate_workload(fold, workload, placement, split=Split.ALL)
            for placement in (spec.current, fold.baseline.placement, solution)
        ]
        first, second, third = (cost.traffic or 0.0 for cost in costs)
        left_out = LeftOut(
            workload=workload.name,
            imbalance_after=after.loads.imbalance,
            imbalance_rule=rule.loads.imbalance,
            imbalance_before=before.loads.imbalance,
            worst_rank_ratio=after.loads.worst_ratio,
            worst_rank_ratio_before=before.loads.worst_ratio,
            traffic=(first, second, third) if spec.goal.is_about_traffic else None,
        )
        folds.append(left_out)
    return tuple(folds)
