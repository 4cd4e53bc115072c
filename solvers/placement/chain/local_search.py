"""Swaps from clusters of experts with the same transitions, under a rising price of overload.

    L layers   E experts   G ranks   e on rank a, f on rank b

The start are the clusters of `clusters.py`, or the balanced placement of `swap_search.py` where
ranks differ in slots. Layers take turns in a descent (`swap_search.py`): first load above a limit
has a price, so that clusters can pass each other, then it is forbidden; a layer that is still above
its limit is repaired by load alone. Then two ranks trade places in some neighbouring layers, and
layers descend again, back where that did not help.

With the neighbouring layers as they are, an expert costs price(e, g) on rank g, and a swap changes
the total by price(e, b) - price(e, a) + price(f, a) - price(f, b). For the most-loaded pair of
ranks the total stands in at first. With B the flow between the ranks of a pair of layers, a swap in
the earlier layer changes two rows of it, and the pair then costs

    max(most of the other rows, row(e, f), row(f, e))
    row(e, f) = max_h cost(a, h) * (B(a, h) - out(e, h) + out(f, h))

with out(e, h) what e sends to rank h; in the later layer columns take the place of rows.

The number of trades is fixed by the size, so equal inputs give equal placements where time
suffices. The bound is that of `bound.py`.
"""

import math
import time
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Final

import numpy as np

from solvers.placement.chain.bound import lower_bound
from solvers.placement.chain.check import objective, violations
from solvers.placement.chain.clusters import clusters_along_chain
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Floats, Ints, Placement, placed
from solvers.placement.swap_search import SwappedLayer, descend, fit, largest_without_two, settle
from solvers.result import Claim, Status

SEED: Final = 20_250_206
OVERS: Final = (30.0, 100.0, 300.0, 1_000.0, 3_000.0)
"""Prices of load above a limit, in turn: in units of the mean standard deviation of an expert's
prices over ranks, per mean load of an expert."""
TURNS: Final = 2
"""Sweeps over the layers at each price of `OVERS`."""
TRADES: Final = 500
MOST_CELLS: Final = 3e6
"""Flows of all trades, at most: about a second."""
TRADED_LAYERS: Final = 8
"""Consecutive layers in which two ranks swap their experts, at most."""
PATIENCE: Final = 100
"""Trades in a row without a gain that end them."""
LEAST_GAIN_RATIO: Final = 1e-9
"""Smallest gain that counts, as a share of the layer's cost if its whole load took the most
expensive link (of the objective for trades); less is rounding."""
BOUND_RATIO: Final = 0.3
"""Share of the time limit for the bound."""
SEARCH_RATIO: Final = 0.95
"""Share of the time limit after which swaps end; the rest is for pricing the candidates."""


def solve(problem: ChainProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return the best placement found, with the bound of the pairs of layers."""
    deadline_s = time.perf_counter() + SEARCH_RATIO * time_limit_s
    balanced_LE = fit(problem.load_LE, problem.ranks, problem.most_load_L)
    if balanced_LE is None:
        return Claim(status=Status.UNKNOWN, solution=None, bound=-math.inf)
    bound = lower_bound(problem, time_limit_s=BOUND_RATIO * time_limit_s)
    found_LE = _searched(problem, balanced_LE, deadline_s)
    legal = [
        placement
        for placement in map(placed, (balanced_LE, found_LE))
        if not violations(problem, placement)
    ]
    value, best = min(
        ((objective(problem, placement), placement) for placement in legal), key=itemgetter(0)
    )
    return Claim(status=Status.FEASIBLE, solution=best, bound=min(bound, value))


def _searched(problem: ChainProblem, balanced_LE: Ints, deadline_s: float) -> Ints:
    """Return the best of trades between ranks, begun where the descent ends."""
    slots_G = problem.ranks.slots_G
    rank_LE = balanced_LE.copy()
    if problem.num_layers > 1 and (slots_G == slots_G[0]).all():
        rank_LE = clusters_along_chain(problem.flow_TEE, num_ranks=problem.ranks.num_ranks)
    total = replace(problem, measure=Measure.TOTAL)
    for over in OVERS if problem.most_load_L is not None else ():
        sweep(total, rank_LE, deadline_s=deadline_s, over=over, turns=TURNS)
    fits_L = settle(problem.load_LE, rank_LE, problem.limit_L, deadline_s=deadline_s)
    rank_LE[~fits_L] = balanced_LE[~fits_L]
    for measured in (total, problem):
        sweep(measured, rank_LE, deadline_s=deadline_s)
    return _traded(problem, rank_LE, deadline_s)


def sweep(
    problem: ChainProblem,
    rank_LE: Ints,
    *,
    deadline_s: float,
    over: float = math.inf,
    turns: int | None = None,
) -> None:
    """Let layers descend in turns, in place, as long as one improves."""
    layer, unchanged = 0, 0
    left = math.inf if turns is None else turns * problem.num_layers
    while unchanged < problem.num_layers and left > 0 and time.perf_counter() < deadline_s:
        load_E = problem.load_LE[layer]
        swapped = _layer_of(problem, rank_LE, layer)
        is_better = descend(
            swapped,
            load_E=load_E,
            most_load=float(problem.limit_L[layer]),
            least_gain=LEAST_GAIN_RATIO * float(problem.cost_GG.max() * load_E.sum()),
            deadline_s=deadline_s,
            over=over if over == math.inf else over * swapped.spread / max(load_E.mean(), 1e-300),
        )
        unchanged = 0 if is_better else unchanged + 1
        layer, left = (layer + 1) % problem.num_layers, left - 1


def _traded(problem: ChainProblem, rank_LE: Ints, deadline_s: float) -> Ints:
    """Return the best after trades of two equal ranks in some layers, each with a descent."""
    slots_G, rng = problem.ranks.slots_G, np.random.default_rng(SEED)
    pairs = np.argwhere(np.triu(slots_G[:, None] == slots_G, k=1))
    best_LE, value, failed = rank_LE, objective(problem, placed(rank_LE)), 0
    for _ in range(min(TRADES, int(MOST_CELLS / problem.load_LE.size / problem.num_experts))):
        if failed == PATIENCE or not len(pairs) or time.perf_counter() >= deadline_s:
            break
        first = rng.integers(problem.num_layers)
        layers = slice(first, first + 1 + rng.integers(TRADED_LAYERS))
        name_G = np.arange(len(slots_G))
        pair = pairs[rng.integers(len(pairs))]
        name_G[pair] = pair[::-1]
        tried_LE = best_LE.copy()
        tried_LE[layers] = name_G[tried_LE[layers]]
        sweep(problem, tried_LE, deadline_s=deadline_s)
        cost = objective(problem, placed(tried_LE))
        failed += 1
        if cost < value * (1.0 - LEAST_GAIN_RATIO):
            best_LE, value, failed = tried_LE, cost, 0
    return best_LE


@dataclass(slots=True, kw_only=True, eq=False)
class _ChainLayer(SwappedLayer):
    """A layer beside its neighbours as they are."""

    price_EG: Floats
    """Total cost of an expert's flow where it is on a rank."""
    sides: tuple[tuple[Floats, Floats], ...]
    """One pair per neighbouring layer under the most-loaded pair of ranks: token copies from each
    expert to each of its ranks, and the cost of a copy from a rank here to a rank there."""

    @property
    def spread(self) -> float:
        """Mean over experts of the standard deviation of their prices over ranks."""
        return float(self.price_EG.std(axis=1).mean())

    def changes_EE(self) -> Floats:
        if self.sides:
            pairs = [_changed_EE(out_EG, self.rank_E, cost_GG) for out_EG, cost_GG in self.sides]
            return np.asarray(sum(pairs))
        moved_EE = self.price_EG[:, self.rank_E]
        moved_EE = moved_EE - np.diagonal(moved_EE)[:, None]
        return np.asarray(moved_EE + moved_EE.T)


def _layer_of(problem: ChainProblem, rank_LE: Ints, layer: int) -> _ChainLayer:
    """Return a layer beside its neighbours as they are."""
    flow_TEE, cost_GG = problem.flow_TEE, problem.cost_GG
    rank_1G = np.arange(problem.ranks.num_ranks)[None, :]
    neighbours = []
    if layer > 0:
        neighbours.append((layer - 1, flow_TEE[layer - 1].T, cost_GG.T))
    if layer < len(flow_TEE):
        neighbours.append((layer + 1, flow_TEE[layer], cost_GG))
    sides = [
        (sent_EE @ (rank_LE[beside][:, None] == rank_1G).astype(np.float64), cost)
        for beside, sent_EE, cost in neighbours
    ]
    price_EG = np.zeros((problem.num_experts, problem.ranks.num_ranks))
    for out_EG, cost in sides:
        price_EG += out_EG @ cost.T
    is_pair = problem.measure is Measure.MOST_LOADED_PAIR
    return _ChainLayer(
        rank_E=rank_LE[layer], price_EG=price_EG, sides=tuple(sides) if is_pair else ()
    )


def _changed_EE(out_EG: Floats, rank_E: Ints, cost_GG: Floats) -> Floats:
    """Return the change of one layer pair's cost by each swap; `cost_GG` is from rows' ranks."""
    on_rank_EG = (rank_E[:, None] == np.arange(len(cost_GG))).astype(np.float64)
    between_GG = on_rank_EG.T @ out_EG
    row_G = (cost_GG * between_GG).max(axis=1)
    kept_EG = between_GG[rank_E] - out_EG
    row_EE = np.stack(
        [
            (cost_GG[rank] * (kept_G + out_EG)).max(axis=1)
            for rank, kept_G in zip(rank_E, kept_EG, strict=True)
        ]
    )
    without_EE = largest_without_two(row_G)[rank_E][:, rank_E]
    after_EE = np.maximum(without_EE, np.maximum(row_EE, row_EE.T))
    return np.asarray(after_EE - row_G.max())
