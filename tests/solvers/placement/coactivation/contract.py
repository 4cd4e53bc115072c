"""What placements of experts that tokens choose together are held to, tests/solvers/contract.py."""

from collections.abc import Iterable

import numpy as np

from solvers import registry
from solvers.placement.coactivation.bound import lower_bound_L
from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.ranks import Placement, Ranks
from solvers.result import Outcome, Status
from tests.solvers.contract import Contract
from tests.solvers.placement.coactivation import brute_force
from tests.solvers.placement.coactivation.testing import tiny_problem, with_topics


def _features(problem: CoactivationProblem, best: Outcome[Placement]) -> Iterable[str]:
    levels = problem.levels
    shown = {
        "several layers": problem.num_layers > 1,
        "limits": problem.most_load_L is not None,
        "one chosen": problem.expert_LTK.shape[2] == 1,
        "a most-loaded group counts": any(level.peak_cost for level in levels),
        "groups differ in cost": any(len(set(level.weights_J.tolist())) > 1 for level in levels),
        "unequal slots": len(set(problem.ranks.slots_G.tolist())) > 1,
    }
    return (feature for feature, is_shown in shown.items() if is_shown)


def _broken(problem: CoactivationProblem, placement: Placement) -> Placement:
    """The first expert everywhere."""
    return Placement(expert_LS=np.zeros_like(placement.expert_LS))


def topics() -> CoactivationProblem:
    """2,000 tokens of eight latent topics."""
    return with_topics(
        np.random.default_rng(5),
        num_layers=2,
        num_tokens=2000,
        num_chosen=4,
        num_experts=32,
        ranks=Ranks.uniform(ranks=8, slots_per_rank=4, ranks_per_node=4),
    )


COACTIVATION = Contract(
    family=registry.COACTIVATION,
    draw=lambda seed: tiny_problem(np.random.default_rng(seed)),
    oracle=brute_force.solve,
    first=(
        *(1, 7, 13, 15, 16, 17, 18, 33, 39, 40, 41, 45),
        *(46, 47, 55, 58),
    ),
    count=60,
    features=_features,
    expected=frozenset(
        {
            *("several layers", "limits", "one chosen", "a most-loaded group counts"),
            *("groups differ in cost", "unequal slots", "optimal", "infeasible"),
        }
    ),
    often=3,
    exact=frozenset(),
    excess={"swaps": 0.02, "local_search": 0.02},
    bound=lambda problem: float(lower_bound_L(problem).sum()),
    broken=_broken,
    large=topics,
    hurried={
        "swaps": (Status.FEASIBLE,),
        "local_search": (Status.FEASIBLE,),
    },
)
