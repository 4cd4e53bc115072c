"""Layer chain: tokens that go on to another rank or node in the next layer should be few.

    L layers   E experts   G ranks   S = E slots of a layer

The cost of a placement is

    total              sum_l sum_{e,f} flow(l, e, f) * cost(rank_l(e), rank_{l+1}(f))
    most-loaded pair   sum_l max_{g,h} cost(g, h) * flow between g and h    (MoETuner's objective)

subject to a largest rank load per layer, so that low traffic does not cost balance.
Every expert is in one slot.

True for runtimes in which a token's state stays on the rank of its last expert: MoETuner's setting
(arXiv 2502.06643). Engines that combine back to the home rank after every layer gain nothing from
it; see coactivation/problem.py for those.
"""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from solvers.placement.ranks import Floats
from solvers.placement.single import SingleProblem


class Measure(StrEnum):
    """Aggregate of the flow that is minimised."""

    TOTAL = "total"
    """Every token, times the cost of its transition."""
    MOST_LOADED_PAIR = "busiest_pair"
    """Largest flow times cost over pairs of ranks, for each pair of layers, summed."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainProblem(SingleProblem):
    """Flows between the experts of consecutive layers.

    Raises:
        ValueError: a shape is wrong, a number is negative or not finite, or slots differ from
            experts.
    """

    flow_TEE: Floats
    """[L - 1][E][E]: token copies that used e in layer l and f in layer l + 1."""
    cost_GG: Floats
    """Cost of one token copy from rank to rank, e.g. seconds per token; the diagonal is usually
    zero."""
    measure: Measure = Measure.TOTAL

    def __post_init__(self) -> None:
        SingleProblem.__post_init__(self)
        if self.flow_TEE.shape != (self.num_layers - 1, self.num_experts, self.num_experts):
            raise ValueError("flows must be [layers - 1][experts][experts]")
        if self.cost_GG.shape != (self.ranks.num_ranks, self.ranks.num_ranks):
            raise ValueError("costs must be [ranks][ranks]")
        for array in (self.flow_TEE, self.cost_GG):
            if not np.isfinite(array).all() or (array < 0.0).any():
                raise ValueError("flows and costs must be non-negative numbers")
            array.setflags(write=False)
