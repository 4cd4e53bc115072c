"""What placements along a chain of layers are held to, tests/solvers/contract.py."""

from collections.abc import Iterable

import numpy as np

from solvers import registry
from solvers.placement.chain.bound import lower_bound
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Placement, Ranks
from solvers.result import Outcome, Status
from tests.solvers.contract import Contract
from tests.solvers.placement.chain import brute_force
from tests.solvers.placement.chain.testing import latent_clusters, tiny_problem


def _features(problem: ChainProblem, best: Outcome[Placement]) -> Iterable[str]:
    yield "three costs" if len(np.unique(problem.cost_GG)) <= 3 else "costs of any kind"
    yield f"measure {problem.measure}"
    if problem.num_layers == 1:
        yield "one layer"
    if problem.most_load_L is not None:
        yield "limits"
    if len(set(problem.ranks.slots_G.tolist())) > 1:
        yield "unequal slots"


def _broken(problem: ChainProblem, placement: Placement) -> Placement:
    """The first expert everywhere."""
    return Placement(expert_LS=np.zeros_like(placement.expert_LS))


def clusters() -> ChainProblem:
    """Four layers of 16 experts in four latent clusters."""
    ranks = Ranks.uniform(ranks=4, slots_per_rank=4, ranks_per_node=2)
    return latent_clusters(np.random.default_rng(5), num_layers=4, num_experts=16, ranks=ranks)


CHAIN = Contract(
    family=registry.CHAIN,
    draw=lambda seed: tiny_problem(np.random.default_rng(seed)),
    oracle=brute_force.solve,
    first=(2, 5, 11, 12, 14, 19, 20, 27, 28, 44),
    count=60,
    features=_features,
    expected=frozenset(
        {
            *("three costs", "costs of any kind", "one layer", "limits", "unequal slots"),
            *(f"measure {measure}" for measure in Measure),
            *("optimal", "infeasible"),
        }
    ),
    often=3,
    exact=frozenset(),
    excess={"local_search": 0.02},
    bound=lambda problem: lower_bound(problem, time_limit_s=1.0),
    broken=_broken,
    large=clusters,
    hurried={
        "local_search": (Status.FEASIBLE,),
        "moetuner": (Status.FEASIBLE, Status.UNKNOWN),
    },
)
