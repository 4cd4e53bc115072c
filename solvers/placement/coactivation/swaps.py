"""Effect of every swap of two experts of one layer on the groups that tokens touch.

    T tokens   K experts of a token   E experts   J groups of a level

Let a token t choose A but not B, which stand in groups a and b of a level. After the swap t needs
b, which is new to it if no expert of b was chosen, and no longer needs a if A was alone there. If
it chose both, or none, nothing changes (HierMoE, arXiv 2508.09591, section IV). So with

    touch(A, j)   tokens of A that touch group j         tokens(A)   tokens of A
    alone(A)      tokens of A with no other expert in A's group
    lost(A, B)    those of them that chose B as well

the count of group b grows by tokens(A) - touch(A, b) - alone(B) + lost(B, A), that of a likewise
with A and B swapped: a token of both touches b already, so the first difference needs no
correction. Where a copy into a group costs w(j) times the usual, counts and growths are taken times
the weight of their group. Three tables answer for all E (E - 1) / 2 swaps exactly. A swap that is
made changes them only by the tokens of its two experts, T K / E each on average.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from solvers.placement.coactivation.problem import CoactivationProblem, Level
from solvers.placement.ranks import Floats, Ints
from solvers.placement.swap_search import SwappedLayer, largest_without_two

BLOCK_TOKENS: Final = 8_192
"""Tokens counted at once: bounds the memory of K * K keys a token."""


@dataclass(slots=True, kw_only=True, eq=False)
class Tables:
    """Counts of one level of one layer; changed in place as swaps are made."""

    level: Level
    group_E: Ints
    count_J: Ints
    """Tokens that touch each group."""
    tokens_E: Ints
    touch_EJ: Ints
    lost_EE: Ints
    """[A][B]; the diagonal holds alone(A), as A is chosen where A is alone."""

    @classmethod
    def of(cls, level: Level, expert_TK: Ints, rank_E: Ints) -> "Tables":
        """Count all tokens."""
        num_experts, num_groups = len(rank_E), level.num_groups
        tables = cls(
            level=level,
            group_E=level.group_G[rank_E],
            count_J=np.zeros(num_groups, dtype=np.int64),
            tokens_E=np.bincount(expert_TK.ravel(), minlength=num_experts),
            touch_EJ=np.zeros((num_experts, num_groups), dtype=np.int64),
            lost_EE=np.zeros((num_experts, num_experts), dtype=np.int64),
        )
        for first in range(0, len(expert_TK), BLOCK_TOKENS):
            tables.add(expert_TK[first : first + BLOCK_TOKENS], sign=1)
        return tables

    @property
    def peak_cost(self) -> float:
        """Cost of one token copy into the most-loaded group."""
        return self.level.peak_cost * self.level.num_groups

    def cost(self) -> float:
        """Return the level's cost of the layer."""
        weighted_J = self.level.weights_J * self.count_J
        return float(self.level.total_cost * weighted_J.sum() + self.peak_cost * weighted_J.max())

    def changes_EE(self) -> Floats:
        """Return [A][B]: the change of the level's cost if experts A and B are swapped."""
        group_E, weights_J = self.group_E, self.level.weights_J
        grown_EE = self.grown_EE() * weights_J[group_E]
        changed_EE = self.level.total_cost * (grown_EE + grown_EE.T)
        if self.peak_cost:
            value_J = weights_J * self.count_J
            there_EE = value_J[group_E] + grown_EE
            rest_EE = largest_without_two(value_J)[group_E][:, group_E]
            after_EE = np.maximum(rest_EE, np.maximum(there_EE, there_EE.T))
            changed_EE += self.peak_cost * (after_EE - value_J.max())
        return np.asarray(changed_EE)

    def grown_EE(self) -> Ints:
        """[A][B]: by how much B's group grows if A and B are swapped."""
        arrives_EE = self.tokens_E[:, None] - self.touch_EJ[:, self.group_E]
        leaves_EE = (np.diagonal(self.lost_EE)[:, None] - self.lost_EE).T
        grown_EE = arrives_EE - leaves_EE
        grown_EE[self.group_E[:, None] == self.group_E] = 0
        return np.asarray(grown_EE, dtype=np.int64)

    def add(self, expert_NK: Ints, *, sign: int) -> None:
        """Count some tokens, or leave them out with sign -1."""
        num_experts, num_groups = self.touch_EJ.shape
        group_NK = self.group_E[expert_NK]
        is_same_NKK = group_NK[:, :, None] == group_NK[:, None, :]
        is_only_NK = is_same_NKK.sum(axis=2) == 1
        earlier_KK = np.tri(expert_NK.shape[1], k=-1, dtype=bool)
        is_first_NK = ~(is_same_NKK & earlier_KK).any(axis=2)
        self.count_J += sign * np.bincount(group_NK[is_first_NK], minlength=num_groups)
        touch_NKK = expert_NK[:, :, None] * num_groups + group_NK[:, None, :]
        is_counted_NKK = np.broadcast_to(is_first_NK[:, None, :], touch_NKK.shape)
        touch = np.bincount(touch_NKK[is_counted_NKK], minlength=num_experts * num_groups)
        self.touch_EJ += sign * touch.reshape(num_experts, num_groups)
        row_M, place_M = np.nonzero(is_only_NK)
        lost_MK = expert_NK[row_M, place_M][:, None] * num_experts + expert_NK[row_M]
        lost = np.bincount(lost_MK.ravel(), minlength=num_experts**2)
        self.lost_EE += sign * lost.reshape(num_experts, num_experts)


@dataclass(slots=True, kw_only=True, eq=False)
class CoactivatedLayer(SwappedLayer):
    """One layer with the tables of every level."""

    expert_TK: Ints
    tables_H: tuple[Tables, ...]

    @classmethod
    def of(cls, problem: CoactivationProblem, layer: int, rank_E: Ints) -> "CoactivatedLayer":
        """Count one layer of a problem under a placement."""
        expert_TK = problem.expert_LTK[layer]
        tables_H = tuple(Tables.of(level, expert_TK, rank_E) for level in problem.levels)
        return cls(rank_E=rank_E.copy(), expert_TK=expert_TK, tables_H=tables_H)

    def cost(self) -> float:
        """Return the layer's cost, summed over levels."""
        return sum(tables.cost() for tables in self.tables_H)

    def changes_EE(self) -> Floats:
        """Return the change of the cost by each swap."""
        return np.asarray(sum(tables.changes_EE() for tables in self.tables_H))

    def swap(self, first: int, second: int) -> None:
        """Swap two experts."""
        SwappedLayer.swap(self, first, second)
        is_theirs_TK = (self.expert_TK == first) | (self.expert_TK == second)
        expert_NK = self.expert_TK[is_theirs_TK.any(axis=1)]
        for tables in self.tables_H:
            if tables.group_E[first] != tables.group_E[second]:
                tables.add(expert_NK, sign=-1)
                tables.group_E[[first, second]] = tables.group_E[[second, first]]
                tables.add(expert_NK, sign=1)
