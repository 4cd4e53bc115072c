"""What balanced placements of experts are held to, tests/solvers/contract.py."""

from collections.abc import Iterable

import numpy as np

from solvers import registry
from solvers.placement.balance.bound import bound
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.ranks import Placement, Ranks
from solvers.result import Outcome, Status
from tests.solvers.contract import Contract
from tests.solvers.placement.balance import brute_force
from tests.solvers.placement.balance.testing import even_weights, families, tiny_problem


def _features(problem: BalanceProblem, best: Outcome[Placement]) -> Iterable[str]:
    yield f"robust {problem.robust}"
    yield f"workloads {problem.num_workloads}"
    yield f"migration {problem.migration is not None}"
    yield f"active {problem.active_load > 0.0}"
    yield f"equal speeds {bool((problem.ranks.speed_G == 1.0).all())}"
    if problem.ranks.num_slots > problem.num_experts:
        yield "spare slots"


def _covers(method: str, problem: BalanceProblem) -> bool:
    """Rules know no limit on migration."""
    return method != "eplb" or problem.migration is None


def _broken(problem: BalanceProblem, placement: Placement) -> Placement:
    """The first expert everywhere."""
    return Placement(expert_LS=np.zeros_like(placement.expert_LS))


def large_problem() -> BalanceProblem:
    """Three families of loads of 64 experts in 72 slots."""
    rng = np.random.default_rng(0)
    return BalanceProblem(
        load_WLE=families(rng, num_families=3, num_layers=4, num_experts=64),
        weight_W=even_weights(3),
        ranks=Ranks.uniform(ranks=8, slots_per_rank=9),
    )


BALANCE = Contract(
    family=registry.BALANCE,
    draw=lambda seed: tiny_problem(np.random.default_rng(seed)),
    oracle=brute_force.solve,
    first=(1, 2, 4, 8, 9, 18, 19, 20, 24, 27, 28, 34),
    count=40,
    features=_features,
    expected=frozenset(
        {
            *("robust mean", "robust worst", "robust cvar", "workloads 1", "workloads 2"),
            *("workloads 3", "migration True", "migration False", "active True", "active False"),
            *("equal speeds True", "equal speeds False", "spare slots", "optimal"),
        }
    ),
    often=5,
    exact=frozenset(),
    covers=_covers,
    tolerance=1e-6,
    bound=bound,
    broken=_broken,
    large=large_problem,
    hurried={
        "local_search": (Status.FEASIBLE,),
        "eplb": (Status.FEASIBLE,),
    },
)
