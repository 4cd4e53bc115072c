"""The solver behind each `goal.method`, and its size limits.

`auto` takes the default of the objective's family. A method that the goal names decides the plan,
even if EPLB's placement or the current one is better.

    G ranks
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from solvers.family import Family, Problem
from solvers.placement.balance.bound import bound as balance_bound
from solvers.placement.balance.problem import BalanceProblem, ReplicaDispatch
from solvers.placement.chain.bound import lower_bound as chain_bound
from solvers.placement.chain.problem import ChainProblem
from solvers.placement.coactivation.bound import lower_bound_L
from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.ranks import Placement
from solvers.registry import BALANCE, CHAIN, COACTIVATION
from solvers.result import Claim, Outcome, Status
from tuner.errors import SpecError
from tuner.spec.place import PlaceGoal
from tuner.spec.place_method import Method

TrafficProblem = ChainProblem | CoactivationProblem
"""Problem of an objective about traffic."""

MOST_PAIRINGS: Final = 8_000
"""Variables of MoETuner's second program: 4 ranks, the paper's, in 32 layers. CBC orders those in
30 s, and of 9,072 (6 ranks in 8 layers) it found no order in 8 s, of 28,672 none in 12 s
(tests/benchmarks/placement_methods.py)."""
BOUND_RATIO: Final = 0.3
"""Share of the time for the bound where EPLB's rule places."""


def solve_balance(
    problem: BalanceProblem,
    *,
    goal: PlaceGoal,
    time_limit_s: float,
    eplb_placement: Placement | None = None,
) -> Outcome[Placement]:
    """Place by the goal's method.

    Args:
        problem: what to solve.
        goal: names the method.
        time_limit_s: for the solver.
        eplb_placement: EPLB's; None: its global policy.

    Raises:
        SpecError: the method cannot take the problem.
    """
    method = goal.method
    if problem.ranks.num_slots == problem.num_experts:
        # Without replicas every dispatch rule is an even split.
        problem = replace(problem, dispatch=ReplicaDispatch.EVEN)
    if method is Method.EPLB and problem.migration is not None:
        _refuse(goal, "keeps no limit on moved experts; drop the limit, or take auto")
    if method is Method.EPLB and eplb_placement is not None:
        return _by_rule(BALANCE, problem, eplb_placement, balance_bound(problem))
    return BALANCE.solve(problem, method=solver_of(method), time_limit_s=time_limit_s)


def solve_traffic(
    problem: TrafficProblem, *, goal: PlaceGoal, eplb_placement: Placement, time_limit_s: float
) -> Outcome[Placement]:
    """Place by the goal's method; see `solve_balance`."""
    if isinstance(problem, CoactivationProblem):
        if goal.method is Method.EPLB:
            least = float(lower_bound_L(problem).sum())
            return _by_rule(COACTIVATION, problem, eplb_placement, least)
        return COACTIVATION.solve(problem, method=solver_of(goal.method), time_limit_s=time_limit_s)
    if goal.method is Method.EPLB:
        return _by_rule(
            CHAIN,
            problem,
            eplb_placement,
            chain_bound(problem, time_limit_s=BOUND_RATIO * time_limit_s),
        )
    _refuse(goal, chain_refusal(problem, goal.method))
    return CHAIN.solve(problem, method=solver_of(goal.method), time_limit_s=time_limit_s)


def solver_of(method: Method) -> str | None:
    """Return a method's name in the registry of solvers; None: the default of the family."""
    return None if method is Method.AUTO else method.value


def chain_refusal(problem: ChainProblem, method: Method) -> str | None:
    """Return in one line why a method cannot take the problem; None: it can."""
    ranks = problem.ranks.num_ranks
    pairings = (problem.num_layers - 1) * ranks**4
    if method is Method.MOETUNER and pairings > MOST_PAIRINGS:
        return (
            f"pairs {ranks} clusters with {ranks} ranks in {problem.num_layers} layers by"
            f" {pairings:,} variables, and {MOST_PAIRINGS:,} are its limit; take auto or"
            " local_search"
        )
    return None


def merge_candidates(
    candidates: Mapping[str, Placement],
    placements: Mapping[str, Placement],
    *,
    goal: PlaceGoal,
    dispatch: str,
) -> dict[str, Placement]:
    """Return the candidates after a second search for another dispatch rule.

    The automatic choice may keep a placement that was solved for the first rule; a method that the
    goal names uses the second search alone.
    """
    if goal.method is not Method.AUTO:
        return dict(placements)
    return {**candidates, **{f"{name} for {dispatch}": one for name, one in placements.items()}}


def no_placement_reason(goal: PlaceGoal) -> str:
    """Explain a missing plan where the search found nothing and proved nothing."""
    other = "" if goal.method is Method.AUTO else ", or take method auto"
    return f"none found in the time limit; give more with --time-limit{other}"


def _by_rule(
    family: Family[Problem, Placement], problem: Problem, eplb_placement: Placement, least: float
) -> Outcome[Placement]:
    least = min(least, family.check.objective(problem, eplb_placement))
    claim = Claim(status=Status.FEASIBLE, solution=eplb_placement, bound=least)
    return family.checked(problem, claim, method=Method.EPLB.value, solve_s=0.0)


def _refuse(goal: PlaceGoal, reason: str | None) -> None:
    if reason is not None:
        raise SpecError(f"goal.method: {goal.method.value} {reason}")
