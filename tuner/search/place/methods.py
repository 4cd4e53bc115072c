"""The published methods behind one interface: the solver of each `goal.method`, and its limits.

`auto` takes the default of the objective's family. A method that the goal names decides the plan,
even if EPLB's placement or the current one is better.

    G ranks
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

from solvers.placement.balance.bound import bound as balance_bound
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.chain.bound import lower_bound as chain_bound
from solvers.placement.chain.problem import ChainProblem
from solvers.placement.coactivation.bound import lower_bound_L
from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.ranks import Placement
from solvers.result import Claim, Outcome, Status
from tuner.errors import SpecError
from tuner.search.place.problem import FAMILIES, PlaceProblem, TrafficProblem, traffic_problem
from tuner.spec.place import Objective
from tuner.spec.place_method import Method

MOST_PAIRINGS: Final = 8_000
"""Variables of MoETuner's second program: 4 ranks, the paper's, in 32 layers. CBC orders those in
30 s, and of 9,072 (6 ranks in 8 layers) it found no order in 8 s, of 28,672 none in 12 s
(tests/benchmarks/placement_methods.py)."""
BOUND_RATIO: Final = 0.3
"""Share of the time for the bound where EPLB's rule places."""

BOUNDS: Final[Mapping[type, Callable[[Any, float], float]]] = {
    BalanceProblem: lambda problem, _limit_s: balance_bound(problem),
    ChainProblem: lambda problem, limit_s: chain_bound(problem, time_limit_s=limit_s),
    CoactivationProblem: lambda problem, _limit_s: float(lower_bound_L(problem).sum()),
}
"""Bounds of a stated problem in some seconds, beside a placement that no solver made."""


def solve(problem: PlaceProblem, *, time_limit_s: float) -> Outcome[Placement]:
    """Place by the goal's method for its objective and the problem's dispatch rule.

    Raises:
        SpecError: the recordings lack what the objective needs, experts are replicated where it
            takes single ones only, or the method cannot take the problem.
    """
    goal, pricing = problem.spec.goal, problem.pricing
    method = goal.method
    is_time = goal.objective is Objective.LAYER_TIME and pricing is not None
    stated: BalanceProblem | TrafficProblem
    if goal.is_about_traffic:
        stated = traffic_problem(problem)
    else:
        stated = problem.balance(active_load=pricing.active_load if is_time and pricing else 0.0)
    if isinstance(stated, ChainProblem) and method is Method.MOETUNER:
        _refuse_pairings(stated)
    family = FAMILIES[type(stated)]
    if method is not Method.EPLB:
        name = None if method is Method.AUTO else method.value
        return family.solve(stated, method=name, time_limit_s=time_limit_s)
    if problem.migration is not None:
        raise SpecError(
            "goal.method: eplb keeps no limit on moved experts; drop the limit, or take auto"
        )
    placement = problem.baseline.placement
    least = BOUNDS[type(stated)](stated, BOUND_RATIO * time_limit_s)
    least = min(least, family.check.objective(stated, placement))
    claim = Claim(status=Status.FEASIBLE, solution=placement, bound=least)
    return family.checked(stated, claim, method=method.value, solve_s=0.0)


def _refuse_pairings(problem: ChainProblem) -> None:
    ranks = problem.ranks.num_ranks
    pairings = (problem.num_layers - 1) * ranks**4
    if pairings > MOST_PAIRINGS:
        raise SpecError(
            f"goal.method: moetuner pairs {ranks} clusters with {ranks} ranks in"
            f" {problem.num_layers} layers by {pairings:,} variables, and {MOST_PAIRINGS:,} are its"
            " limit; take auto or local_search"
        )
