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

from solvers.placement.ranks import Floats, Ints

BLOCK_TOKENS: Final = 8_192
"""Tokens counted at once: bounds the memory of K * K keys a token."""


@dataclass(slots=True, kw_only=True, eq=False)
class Tables:
    """Counts of one level of one layer; changed in place as swaps are made."""

    group_E: Ints
    weight_J: Floats
    """Weight of a copy into each group, a factor on the level's costs."""
    count_J: Ints
    """Tokens that touch each group."""
    tokens_E: Ints
    touch_EJ: Ints
    lost_EE: Ints
    """[A][B]; the diagonal holds alone(A), as A is chosen where A is alone."""

    @classmethod
    def of(cls, expert_TK: Ints, group_E: Ints, weight_J: Floats) -> "Tables":
        """Count all tokens."""
        num_experts, num_groups = len(group_E), len(weight_J)
        tables = cls(
            group_E=group_E.copy(),
            weight_J=weight_J,
            count_J=np.zeros(num_groups, dtype=np.int64),
            tokens_E=np.bincount(expert_TK.ravel(), minlength=num_experts),
            touch_EJ=np.zeros((num_experts, num_groups), dtype=np.int64),
            lost_EE=np.zeros((num_experts, num_experts), dtype=np.int64),
        )
        for first in range(0, len(expert_TK), BLOCK_TOKENS):
            tables._add(expert_TK[first : first + BLOCK_TOKENS], sign=1)
        return tables

    @property
    def weighted_J(self) -> Floats:
        """The counts times the weights of their groups."""
        return self.weight_J * self.count_J

    def swap(self, one: int, two: int, expert_NK: Ints) -> None:
        """Swap two experts; `expert_NK` are all tokens that chose one of them."""
        if self.group_E[one] == self.group_E[two]:
            return
        self._add(expert_NK, sign=-1)
        self.group_E[[one, two]] = self.group_E[[two, one]]
        self._add(expert_NK, sign=1)

    def grown_EE(self) -> Ints:
        """[A][B]: by how much B's group grows if A and B are swapped."""
        arrives_EE = self.tokens_E[:, None] - self.touch_EJ[:, self.group_E]
        leaves_EE = (np.diagonal(self.lost_EE)[:, None] - self.lost_EE).T
        grown_EE = arrives_EE - leaves_EE
        grown_EE[self.group_E[:, None] == self.group_E] = 0
        return np.asarray(grown_EE, dtype=np.int64)

    def _add(self, expert_NK: Ints, *, sign: int) -> None:
        num_experts, num_groups = self.touch_EJ.shape
        num_chosen = expert_NK.shape[1]
        group_NK = self.group_E[expert_NK]
        is_same_NKK = group_NK[:, :, None] == group_NK[:, None, :]
        is_only_NK = is_same_NKK.sum(axis=2) == 1
        earlier_KK = np.tri(num_chosen, k=-1, dtype=bool)
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


def largest_without_two(value_J: Floats) -> Floats:
    """Return [i][j]: the largest value of the groups other than i and j; 0 where there is none."""
    num_groups = len(value_J)
    order = np.argsort(-value_J, kind="stable")
    top = np.concatenate([order[:3], np.full(3, num_groups)])[:3]
    value = np.concatenate([value_J, [0.0]])[np.minimum(top, num_groups)]
    groups = np.arange(num_groups)
    has_first = (groups == top[0])[:, None] | (groups == top[0])
    has_second = (groups == top[1])[:, None] | (groups == top[1])
    rest_JJ = np.where(has_first & has_second, value[2], np.where(has_first, value[1], value[0]))
    return np.asarray(rest_JJ, dtype=np.float64)


def changes_EE(tables: tuple[Tables, ...], total_cost_H: Floats, peak_cost_H: Floats) -> Floats:
    """Return [A][B]: the change of the layer's cost if experts A and B are swapped.

    `peak_cost_H`: cost of one token copy into the most-loaded group, times the number of groups.
    """
    changed_EE = np.zeros(tables[0].lost_EE.shape)
    for level, total_cost, peak_cost in zip(tables, total_cost_H, peak_cost_H, strict=True):
        grown_EE = level.grown_EE() * level.weight_J[level.group_E]
        if total_cost:
            changed_EE += total_cost * (grown_EE + grown_EE.T)
        if peak_cost:
            group_E, value_J = level.group_E, level.weighted_J
            rest_EE = largest_without_two(value_J)[group_E][:, group_E]
            there_EE = value_J[group_E] + grown_EE
            after_EE = np.maximum(rest_EE, np.maximum(there_EE, there_EE.T))
            changed_EE += peak_cost * (after_EE - value_J.max())
    return changed_EE
