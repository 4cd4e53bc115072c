"""One layer while its experts are being swapped: ranks, loads and the tables of every level.

T tokens, K experts of a token, E experts, G ranks, H levels, N tokens of a swap.
"""

from dataclasses import dataclass

import numpy as np

from solvers.placement.coactivation.problem import CoactivationProblem
from solvers.placement.coactivation.swaps import Tables, changes_EE
from solvers.placement.ranks import Floats, Ints
from solvers.placement.single import forbid_swaps
from solvers.placement.start_placement import rank_loads


@dataclass(slots=True, kw_only=True, eq=False)
class Layer:
    """Changed in place by `swap`; everything else is read."""

    expert_TK: Ints
    token_M: Ints
    """Tokens by expert; those of expert e are `token_M[first_E[e] : first_E[e + 1]]`."""
    first_E: Ints
    load_E: Floats
    most_load: float
    rank_E: Ints
    load_G: Floats
    tables_H: tuple[Tables, ...]
    total_cost_H: Floats
    peak_cost_H: Floats
    """Of one token copy into the most-loaded group, the number of groups counted in."""

    def cost(self) -> float:
        """What the layer costs."""
        return float(
            sum(
                total * tables.weighted_J.sum() + peak * tables.weighted_J.max()
                for tables, total, peak in zip(
                    self.tables_H, self.total_cost_H, self.peak_cost_H, strict=True
                )
            )
        )

    def allowed_changes_EE(self) -> Floats:
        """By how much each swap changes the cost; infinite where a limit forbids it."""
        changed_EE = changes_EE(self.tables_H, self.total_cost_H, self.peak_cost_H)
        forbid_swaps(
            changed_EE,
            rank_E=self.rank_E,
            load_E=self.load_E,
            load_G=self.load_G,
            most_load=self.most_load,
        )
        return changed_EE

    def swap(self, one: int, two: int) -> None:
        """Swap two experts."""
        tokens_N = np.unique(np.concatenate([self._tokens(one), self._tokens(two)]))
        for tables in self.tables_H:
            tables.swap(one, two, self.expert_TK[tokens_N])
        self.rank_E[[one, two]] = self.rank_E[[two, one]]
        self.load_G = rank_loads(self.load_E[None], self.rank_E[None], len(self.load_G))[0]

    def _tokens(self, expert: int) -> Ints:
        return self.token_M[self.first_E[expert] : self.first_E[expert + 1]]


def layer_of(problem: CoactivationProblem, number: int, rank_E: Ints) -> Layer:
    """Count one layer of a problem under a placement."""
    expert_TK, load_E = problem.expert_LTK[number], problem.load_LE[number]
    tokens_E = np.bincount(expert_TK.ravel(), minlength=problem.num_experts)
    by_expert = np.argsort(expert_TK.ravel(), kind="stable")
    limit = np.inf if problem.most_load_L is None else float(problem.most_load_L[number])
    return Layer(
        expert_TK=expert_TK,
        token_M=by_expert // expert_TK.shape[1],
        first_E=np.concatenate([[0], np.cumsum(tokens_E)]),
        load_E=load_E,
        most_load=limit,
        rank_E=rank_E.copy(),
        load_G=rank_loads(load_E[None], rank_E[None], problem.ranks.num_ranks)[0],
        tables_H=tuple(
            Tables.of(expert_TK, level.group_G[rank_E], level.weights_J) for level in problem.levels
        ),
        total_cost_H=np.array([level.total_cost for level in problem.levels]),
        peak_cost_H=np.array([level.peak_cost * level.num_groups for level in problem.levels]),
    )
