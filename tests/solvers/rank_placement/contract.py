"""What placements of ranks on nodes are held to, tests/solvers/contract.py."""

from collections.abc import Iterable

import numpy as np

from solvers import registry
from solvers.rank_placement.bound import lower_bound_s
from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem
from solvers.result import Outcome, Status
from tests.solvers.contract import Contract
from tests.solvers.rank_placement import brute_force
from tests.solvers.rank_placement.testing import racks, tiny_problem


def _features(problem: RankPlacementProblem, best: Outcome[RankPlacement]) -> Iterable[str]:
    has_all_to_all = problem.block > 1 and bool(problem.all_to_all_bytes_S.any())
    shown = {
        "several pipelines": problem.pipelines > 1,
        "several stages": problem.stages > 1,
        "both": problem.pipelines > 1 < problem.stages,
        "a spare node": problem.num_nodes > problem.num_used_nodes,
        "blocks with all-to-all": has_all_to_all,
        "several blocks that do": has_all_to_all and problem.block < problem.pipelines,
        "one way slower": bool((problem.bytes_per_s_NN != problem.bytes_per_s_NN.T).any()),
    }
    return (feature for feature, is_shown in shown.items() if is_shown)


def _broken(problem: RankPlacementProblem, placement: RankPlacement) -> RankPlacement:
    """One node for everything."""
    return RankPlacement(node_RS=((0,) * problem.stages,) * problem.pipelines)


RANK_PLACEMENT = Contract(
    family=registry.RANK_PLACEMENT,
    draw=lambda seed: tiny_problem(np.random.default_rng(seed)),
    oracle=brute_force.solve,
    first=(30, 3, 6, 7, 12, 14, 24, 28),
    count=40,
    features=_features,
    expected=frozenset(
        {
            *("several pipelines", "several stages", "both", "a spare node", "one way slower"),
            *("blocks with all-to-all", "several blocks that do", "optimal"),
        }
    ),
    often=3,
    # Few nodes: every order is tried.
    exact=frozenset({"annealing"}),
    bound=lower_bound_s,
    broken=_broken,
    large=lambda: racks(np.random.default_rng(1), num_racks=4, nodes_per_rack=4, pipelines=4),
    hurried={"annealing": (Status.FEASIBLE,)},
)
