"""The families of solvers, and in each the methods by the name that users type.

Adding a method is one file with `solve(problem, *, time_limit_s, threads) -> Claim` and one line
here; adding a family is a folder with `problem.py`, `check.py` and its methods, and one value here.
The contract tests of a family run over its `methods`.
"""

from typing import Final

from solvers.family import Family
from solvers.instances import check as instances_check
from solvers.instances.problem import InstancePlan, InstancesProblem
from solvers.layout import check as layout_check
from solvers.layout.problem import Layout, LayoutProblem
from solvers.partition import check as partition_check
from solvers.partition.problem import Partition, PartitionProblem
from solvers.placement.balance import check as balance_check
from solvers.placement.balance.problem import BalanceProblem
from solvers.placement.chain import check as chain_check
from solvers.placement.chain.problem import ChainProblem
from solvers.placement.coactivation import check as coactivation_check
from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.ranks import Placement
from solvers.rank_placement import check as rank_placement_check
from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem

LAYOUT: Final[Family[LayoutProblem, Layout]] = Family(
    name="layout",
    methods={"exact": "solvers.layout.exact:solve"},
    default="exact",
    check=layout_check,
)

PARTITION: Final[Family[PartitionProblem, Partition]] = Family(
    name="partition",
    methods={"exact": "solvers.partition.exact:solve"},
    default="exact",
    check=partition_check,
)

RANK_PLACEMENT: Final[Family[RankPlacementProblem, RankPlacement]] = Family(
    name="rank placement",
    methods={"annealing": "solvers.rank_placement.annealing:solve"},
    default="annealing",
    check=rank_placement_check,
)

INSTANCES: Final[Family[InstancesProblem, InstancePlan]] = Family(
    name="instances",
    methods={"milp": "solvers.instances.milp:solve"},
    default="milp",
    check=instances_check,
)

BALANCE: Final[Family[BalanceProblem, Placement]] = Family(
    name="balance",
    methods={
        "local_search": "solvers.placement.balance.starts:solve",
        "eplb": "solvers.placement.balance.eplb:solve",
    },
    default="local_search",
    check=balance_check,
    standard_error=balance_check.standard_error,
)

CHAIN: Final[Family[ChainProblem, Placement]] = Family(
    name="layer chain",
    methods={
        "local_search": "solvers.placement.chain.local_search:solve",
        "moetuner": "solvers.placement.chain.moetuner:solve",
    },
    default="local_search",
    check=chain_check,
)

COACTIVATION: Final[Family[CoactivationProblem, Placement]] = Family(
    name="co-activation",
    methods={
        "local_search": "solvers.placement.coactivation.local_search:solve",
        "swaps": "solvers.placement.coactivation.local_search:swaps",
    },
    default="local_search",
    check=coactivation_check,
)
