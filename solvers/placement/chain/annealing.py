"""Swaps between pairs of ranks, in every second layer at once, at falling temperature.

    L layers   A layers of one parity   E experts   G ranks   C slots of the largest rank
    P = G // 2 pairs of ranks   C * C swaps of a pair

A step pairs the ranks at random, equally in every layer, and makes at most one swap per pair,
drawn from all C * C and "none" by the heat-bath rule: probability ~ exp(-change / temperature), as
the largest of the scores plus Gumbel noise. Pairs share no rank and the layers of one parity no
flow, so all changes of a step are exact and independent, and one step is a dozen operations on
arrays of A P C C numbers. Load above a layer's limit costs `over` a unit, rising until nobody pays
it; at infinite `over` no swap may leave a rank above its limit.

Temperatures are in units of the mean standard deviation of an expert's prices over ranks, `over` in
that unit per mean load of an expert.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np

from solvers.placement.chain.flows import Flows, Singles
from solvers.placement.ranks import Floats, Ints, Ranks
from solvers.placement.single import placed

NOISE_NUMBERS: Final = 1 << 20
"""Gumbel draws made once; a step reads a stretch of them from a random place."""
NOBODY: Final = -1
"""Stands in a slot that a rank with fewer slots does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """How an annealing cools."""

    hot: float
    cold: float
    over_first: float
    over_last: float
    """May be infinite, together with `over_first`."""

    def at(self, progress_ratio: float) -> tuple[float, float]:
        """Temperature and price of load above a limit, both geometric."""
        temperature = self.hot * (self.cold / self.hot) ** progress_ratio
        if self.over_last == np.inf:
            return temperature, np.inf
        return temperature, self.over_first * (self.over_last / self.over_first) ** progress_ratio


@dataclass(slots=True, kw_only=True, eq=False)
class Board:
    """The layers of one parity while their experts are being swapped; changed in place."""

    expert_AGC: Ints
    price_AEG: Singles
    load_AE: Floats
    load_AG: Floats
    limit_A: Floats | None


class Annealer:
    """A problem's arrays and the random numbers, made once for several runs."""

    def __init__(
        self,
        flows: Flows,
        load_LE: Floats,
        ranks: Ranks,
        limit_L: Floats | None,
        rng: np.random.Generator,
    ) -> None:
        self.flows, self.load_LE, self.ranks, self.limit_L = flows, load_LE, ranks, limit_L
        self.rng = rng
        most_slots = int(ranks.slots_G.max())
        slot_GC = ranks.first_slot_G[:, None] + np.arange(most_slots)
        self.is_slot_GC = np.arange(most_slots) < ranks.slots_G[:, None]
        self.slot_GC = np.where(self.is_slot_GC, slot_GC, 0)
        self.parity = [np.arange(first, len(load_LE), 2) for first in (0, 1)]
        swaps = len(self.parity[0]) * (ranks.num_ranks // 2) * (most_slots**2 + 1)
        noise = rng.gumbel(size=max(NOISE_NUMBERS, 4 * swaps))
        self.noise = noise.astype(np.float32)

    @property
    def swaps_of_a_step(self) -> int:
        """Swaps that one step weighs."""
        return int(self.parity[0].size * (self.ranks.num_ranks // 2) * self.slot_GC.shape[1] ** 2)

    @property
    def steps_of_a_round(self) -> int:
        """Steps in which every pair of ranks meets about once in every layer."""
        return 2 * max(1, self.ranks.num_ranks - 1)

    def temperature_unit(self, rank_LE: Ints) -> float:
        """Mean over experts of the standard deviation of their prices over ranks."""
        price_AEG = self.flows.prices_AEG(self.parity[0], rank_LE)
        return float(price_AEG.std(axis=2).mean())

    def turn(
        self, rank_LE: Ints, which: int, *, temperature: float, over: float, steps: int
    ) -> None:
        """Price the layers of one parity and swap in them, in place."""
        layer_A = self.parity[which]
        if not len(layer_A) or self.ranks.num_ranks < 2:
            return
        board = self._board(layer_A, rank_LE)
        for _ in range(steps):
            self._step(board, temperature, over)
        rank_AGC = np.broadcast_to(np.arange(self.ranks.num_ranks)[:, None], board.expert_AGC.shape)
        is_real_AGC = board.expert_AGC != NOBODY
        layer_AGC = np.broadcast_to(layer_A[:, None, None], board.expert_AGC.shape)
        rank_LE[layer_AGC[is_real_AGC], board.expert_AGC[is_real_AGC]] = rank_AGC[is_real_AGC]

    def _board(self, layer_A: Ints, rank_LE: Ints) -> Board:
        expert_AS = placed(rank_LE[layer_A]).expert_LS
        expert_AGC = np.where(self.is_slot_GC, expert_AS[:, self.slot_GC], NOBODY)
        load_AE = self.load_LE[layer_A]
        load_AS = np.take_along_axis(load_AE, expert_AS, axis=1)
        return Board(
            expert_AGC=expert_AGC,
            price_AEG=self.flows.prices_AEG(layer_A, rank_LE),
            load_AE=load_AE,
            load_AG=np.add.reduceat(load_AS, self.ranks.first_slot_G, axis=1),
            limit_A=None if self.limit_L is None else self.limit_L[layer_A],
        )

    def _step(self, board: Board, temperature: float, over: float) -> None:
        num_layers, num_ranks, most_slots = board.expert_AGC.shape
        num_pairs = num_ranks // 2
        order_G = self.rng.permutation(num_ranks)
        one_P, two_P = order_G[:num_pairs], order_G[num_pairs : 2 * num_pairs]
        layer_A11 = np.arange(num_layers)[:, None, None]
        mine_APC, theirs_APC = board.expert_AGC[:, one_P], board.expert_AGC[:, two_P]
        one_1P1, two_1P1 = one_P[None, :, None], two_P[None, :, None]
        price = board.price_AEG
        mine_moved = price[layer_A11, mine_APC, two_1P1] - price[layer_A11, mine_APC, one_1P1]
        theirs_moved = price[layer_A11, theirs_APC, one_1P1] - price[layer_A11, theirs_APC, two_1P1]
        if not self.is_slot_GC.all():
            mine_moved[mine_APC == NOBODY] = np.inf
            theirs_moved[theirs_APC == NOBODY] = np.inf
        change = mine_moved[..., :, None] + theirs_moved[..., None, :]
        if board.limit_A is not None:
            change += self._overload(board, one_P, two_P, mine_APC, theirs_APC, over)
        score = change.reshape(num_layers * num_pairs, most_slots**2) * np.float32(-1 / temperature)
        first = int(self.rng.integers(len(self.noise) - score.size - len(score)))
        score += self.noise[first : first + score.size].reshape(score.shape)
        staying = self.noise[first + score.size : first + score.size + len(score)]
        swap_M = score.argmax(axis=1)
        taken = np.flatnonzero(score[np.arange(len(score)), swap_M] > staying)
        layer_M, pair_M = np.divmod(taken, num_pairs)
        self._swap(board, layer_M, one_P[pair_M], two_P[pair_M], swap_M[taken])

    @staticmethod
    def _overload(
        board: Board,
        one_P: Ints,
        two_P: Ints,
        mine_APC: Ints,
        theirs_APC: Ints,
        over: float,
    ) -> Singles:
        """What each swap changes in the price of load above the limit."""
        layer_A11 = np.arange(len(mine_APC))[:, None, None]
        mine = board.load_AE[layer_A11, mine_APC][..., :, None]
        theirs = board.load_AE[layer_A11, theirs_APC][..., None, :]
        more = theirs - mine
        limit = board.limit_A[:, None] if board.limit_A is not None else np.inf
        one_over = (board.load_AG[:, one_P] - limit)[..., None, None]
        two_over = (board.load_AG[:, two_P] - limit)[..., None, None]
        if over == np.inf:
            is_over = (one_over + more > 0.0) | (two_over - more > 0.0)
            return np.where(is_over, np.float32(np.inf), np.float32(0.0))
        excess = np.maximum(one_over + more, 0.0) + np.maximum(two_over - more, 0.0)
        excess -= np.maximum(one_over, 0.0) + np.maximum(two_over, 0.0)
        return np.asarray(over * excess, dtype=np.float32)

    @staticmethod
    def _swap(board: Board, layer_M: Ints, one_M: Ints, two_M: Ints, swap_M: Ints) -> None:
        mine_M, theirs_M = np.divmod(swap_M, board.expert_AGC.shape[2])
        expert_M = board.expert_AGC[layer_M, one_M, mine_M]
        other_M = board.expert_AGC[layer_M, two_M, theirs_M]
        board.expert_AGC[layer_M, one_M, mine_M] = other_M
        board.expert_AGC[layer_M, two_M, theirs_M] = expert_M
        more_M = board.load_AE[layer_M, other_M] - board.load_AE[layer_M, expert_M]
        board.load_AG[layer_M, one_M] += more_M
        board.load_AG[layer_M, two_M] -= more_M
