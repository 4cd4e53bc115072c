"""What each expert of a layer would cost on each rank while the layers beside it stay as they are.

    L layers   T = L - 1 pairs of layers   A chosen layers, no two consecutive   E experts   G ranks

The cost of a chain is linear in one layer at a time: expert e on rank g pays

    price(e, g) = sum_h in(e, h) cost(h, g) + out(e, h) cost(g, h)

with `in` and `out` its flow from and to the experts that are on rank h in the layers before and
after. Layers of equal parity do not meet in any flow, so half of all layers are priced, and moved,
at once. Single precision, flows and costs scaled to at most 1: the search's own numbers, never the
ones that are claimed.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from solvers.placement.chain.problem import ChainProblem
from solvers.placement.ranks import Ints

Singles = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Flows:
    """The flows of a problem in both directions, scaled."""

    onward_TEE: Singles
    """[pair][here][next]."""
    back_TEE: Singles
    """[pair][next][here]."""
    cost_GG: Singles
    unit: float
    """Cost of a problem for one of these prices."""

    @classmethod
    def of(cls, problem: ChainProblem) -> "Flows":
        """Scale the flows and costs of a problem."""
        most_flow = max(float(problem.flow_TEE.max(initial=0.0)), np.finfo(float).tiny)
        most_cost = max(float(problem.cost_GG.max()), np.finfo(float).tiny)
        onward_TEE = (problem.flow_TEE / most_flow).astype(np.float32)
        return cls(
            onward_TEE=onward_TEE,
            back_TEE=np.ascontiguousarray(onward_TEE.transpose(0, 2, 1)),
            cost_GG=(problem.cost_GG / most_cost).astype(np.float32),
            unit=most_flow * most_cost,
        )

    def prices_AEG(self, layer_A: Ints, rank_LE: Ints) -> Singles:
        """Price every expert of the chosen layers on every rank."""
        num_layers, num_experts = rank_LE.shape
        price_AEG = np.zeros((len(layer_A), num_experts, len(self.cost_GG)), dtype=np.float32)
        for price_EG, layer in zip(price_AEG, layer_A, strict=True):
            if layer > 0:
                on_rank_EG = self._on_rank_EG(rank_LE[layer - 1])
                price_EG += self.back_TEE[layer - 1] @ on_rank_EG @ self.cost_GG
            if layer < num_layers - 1:
                on_rank_EG = self._on_rank_EG(rank_LE[layer + 1])
                price_EG += self.onward_TEE[layer] @ on_rank_EG @ self.cost_GG.T
        return price_AEG

    def _on_rank_EG(self, rank_E: Ints) -> Singles:
        on_rank_EG = np.zeros((len(rank_E), len(self.cost_GG)), dtype=np.float32)
        on_rank_EG[np.arange(len(rank_E)), rank_E] = 1.0
        return on_rank_EG
