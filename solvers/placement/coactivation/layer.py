"""One layer while its experts are being swapped: ranks and the tables of every level.

T tokens, K experts of a token, E experts, G ranks, H levels, N tokens of a swap.
"""

from dataclasses import dataclass

import numpy as np

from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.coactivation.swaps import Tables, changes_EE
from solvers.placement.ranks import Floats, Ints


@dataclass(slots=True, kw_only=True, eq=False)
class Layer:
    """Changed in place by `swap`; everything else is read."""

    expert_TK: Ints
    token_M: Ints
    """Tokens by expert; those of expert e are `token_M[first_E[e] : first_E[e + 1]]`."""
    first_E: Ints
    rank_E: Ints
    tables_H: tuple[Tables, ...]
    total_cost_H: Floats
    peak_cost_H: Floats
    """Cost of one token copy into the most-loaded group, times the number of groups, by level."""

    def cost(self) -> float:
        """Return the layer's cost, summed over levels."""
        return float(
            sum(
                total * tables.weighted_J.sum() + peak * tables.weighted_J.max()
                for tables, total, peak in zip(
                    self.tables_H, self.total_cost_H, self.peak_cost_H, strict=True
                )
            )
        )

    def changes_EE(self) -> Floats:
        """Return the change of the cost by each swap."""
        return changes_EE(self.tables_H, self.total_cost_H, self.peak_cost_H)

    def swap(self, one: int, two: int) -> None:
        """Swap two experts."""
        tokens_N = np.unique(np.concatenate([self._tokens(one), self._tokens(two)]))
        for tables in self.tables_H:
            tables.swap(one, two, self.expert_TK[tokens_N])
        self.rank_E[[one, two]] = self.rank_E[[two, one]]

    def _tokens(self, expert: int) -> Ints:
        return self.token_M[self.first_E[expert] : self.first_E[expert + 1]]


def layer_of(problem: CoactivationProblem, number: int, rank_E: Ints) -> Layer:
    """Count one layer of a problem under a placement."""
    expert_TK = problem.expert_LTK[number]
    tokens_E = np.bincount(expert_TK.ravel(), minlength=problem.num_experts)
    by_expert = np.argsort(expert_TK.ravel(), kind="stable")
    return Layer(
        expert_TK=expert_TK,
        token_M=by_expert // expert_TK.shape[1],
        first_E=np.concatenate([[0], np.cumsum(tokens_E)]),
        rank_E=rank_E.copy(),
        tables_H=tuple(
            Tables.of(expert_TK, level.group_G[rank_E], level.weights_J) for level in problem.levels
        ),
        total_cost_H=np.array([level.total_cost for level in problem.levels]),
        peak_cost_H=np.array([level.peak_cost * level.num_groups for level in problem.levels]),
    )
