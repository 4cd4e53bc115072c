"""Every order of few nodes; simulated annealing over those of many, then swaps until none helps.

The state is an order of all nodes; the first R S fill the pipelines row by row, the rest are spare.
Up to `MOST_ORDERS` orders are tried one by one, which proves the best. Where there are more, each
step reverses a stretch, moves one node, swaps two, moves a stretch, or moves it reversed, with
equal probability; a step that is worse by d is taken with probability exp(-d / temperature). The
temperature falls from a share of the first cost to a thousandth of that. The five moves are those
of Pipette (DATE 2024, arXiv:2405.18093); its stopping rule is a wall clock, ours a number of steps
as well, so that equal inputs give equal placements where time suffices.

The objective is a sum of two maxima, on which most steps change nothing. So steps are evaluated by
it plus the means over all pipelines and all ring links; what is kept is evaluated by the objective
alone. The start is the best of three: the nodes as numbered, and two that follow the links. There
nodes are merged along the fastest links first (single linkage, Sibson, The Computer Journal 16(1),
1973), which lines up every rack at every level, and the line is cut into rings, or into pipelines.

Optimality is proven where all orders were tried or the cost meets the bound of `bound.py`;
otherwise FEASIBLE.

Letters: N nodes in the order of the state, R pipelines, S stages, B pipelines of a block, G blocks.
"""

import itertools
import math
import time

import numpy as np
import numpy.typing as npt

from solvers.rank_placement.bound import lower_bound_s
from solvers.rank_placement.problem import RankPlacement, RankPlacementProblem
from solvers.result import Claim, Status

SEED = 20_240_518
MOST_ORDERS = 5_040
"""Orders that take less time than annealing as many nodes: seven nodes, or four of eight."""
STEPS_PER_NODE = 1_500
MOST_STEPS = 150_000
FIRST_TEMPERATURE_RATIO = 0.02
"""First temperature as a share of the start's cost."""
LAST_TEMPERATURE_RATIO = 1e-3
"""Last temperature as a share of the first."""
TOLERANCE_RATIO = 1e-9
"""A cost this near to the bound meets it."""
CLOCK_STEPS = 64
"""Steps between two checks of the clock."""

Order = npt.NDArray[np.int64]
Seconds = npt.NDArray[np.float64]


class _Cost:
    """The objective of an order, with the matrices that it looks things up in."""

    def __init__(self, problem: RankPlacementProblem) -> None:
        self.problem = problem
        self.shape = (problem.pipelines, problem.stages)
        slowness_NN = 1.0 / problem.bytes_per_s_NN
        self.hop_s_NN = problem.rounds * problem.hop_bytes * (slowness_NN + slowness_NN.T)
        self.slowness_NN = slowness_NN
        self.volume_S = _ring_share(problem.pipelines) * problem.gradient_bytes_S
        blocks = problem.pipelines // problem.block
        self.far_volume_S = _ring_share(blocks) * problem.block_gradient_bytes_S
        self.has_all_to_all = problem.block > 1 and bool(problem.all_to_all_bytes_S.any())

    def __call__(self, order_N: Order) -> tuple[float, float]:
        """Seconds of a step, and those plus the means."""
        node_RS = order_N[: self.problem.num_used_nodes].reshape(self.shape)
        pipeline_R = np.zeros(self.shape[0])
        if self.has_all_to_all:
            sending_RS = self._all_to_all_s_RS(node_RS)
            repeats = self.problem.num_microbatches - 1
            pipeline_R = sending_RS.sum(axis=1) + repeats * sending_RS.max(axis=1)
        if self.shape[1] > 1:
            pipeline_R = pipeline_R + self.hop_s_NN[node_RS[:, :-1], node_RS[:, 1:]].sum(axis=1)
        cost, mean = float(pipeline_R.max()), float(pipeline_R.mean())
        if self.shape[0] > 1:
            ring_RS = self._rings_s_RS(node_RS, self.volume_S, stride=1)
            if self.far_volume_S.any():
                far_RS = self._rings_s_RS(node_RS, self.far_volume_S, stride=self.problem.block)
                cost += float((ring_RS.max(axis=0) + far_RS.max(axis=0)).max())
                mean += float(ring_RS.mean() + far_RS.mean())
            else:
                cost, mean = cost + float(ring_RS.max()), mean + float(ring_RS.mean())
        return cost, cost + mean

    def _rings_s_RS(self, node_RS: Order, volume_S: Seconds, *, stride: int) -> Seconds:
        """Seconds of every link of rings that take each `stride`-th node."""
        next_RS = np.concatenate([node_RS[stride:], node_RS[:stride]])
        seconds_RS: Seconds = volume_S * self.slowness_NN[node_RS, next_RS]
        return seconds_RS

    def _all_to_all_s_RS(self, node_RS: Order) -> Seconds:
        """Seconds of a micro-batch that every cell spends in its block's all-to-all."""
        R, S = self.shape
        block = self.problem.block
        nodes_GBS = node_RS.reshape(R // block, block, S)
        # The diagonal is infinitely fast, so that a node sends itself for nothing.
        slow_GBBS = self.slowness_NN[nodes_GBS[:, :, None], nodes_GBS[:, None, :]]
        slowest_GS = slow_GBBS.sum(axis=2).max(axis=1)
        seconds_RS: Seconds = np.repeat(self.problem.all_to_all_bytes_S * slowest_GS, block, axis=0)
        return seconds_RS


def solve(
    problem: RankPlacementProblem, *, time_limit_s: float, threads: int = 1
) -> Claim[RankPlacement]:
    """Return the best order met, with the lower bound of the matrix."""
    deadline_s = time.perf_counter() + time_limit_s
    cost, bound = _Cost(problem), lower_bound_s(problem)
    listed = np.arange(problem.num_nodes)
    start = min((listed, *_following_links(problem)), key=lambda order: cost(order)[0])
    enough = bound * (1.0 + TOLERANCE_RATIO)
    R, S = cost.shape
    if math.perm(problem.num_nodes, R * S) <= MOST_ORDERS:
        order, value, bound = _best_of_all(cost, start, bound=bound, deadline_s=deadline_s)
    else:
        order, value = _anneal(cost, start, enough=enough, deadline_s=deadline_s)
        order, value = _swap(cost, order, value, enough=enough, deadline_s=deadline_s)
    cells = order[: R * S].reshape(R, S).tolist()
    placement = RankPlacement(node_RS=tuple(tuple(nodes) for nodes in cells))
    status = Status.OPTIMAL if value <= bound * (1.0 + TOLERANCE_RATIO) else Status.FEASIBLE
    return Claim(status=status, solution=placement, bound=min(bound, value))


def _ring_share(nodes: int) -> float:
    """Return how many times its bytes a node of a ring sends in an all-reduce."""
    return 2.0 * (nodes - 1) / nodes


def _following_links(problem: RankPlacementProblem) -> tuple[Order, Order]:
    """Nodes lined up along the fastest links, cut into rings and cut into pipelines."""
    N, R, S = problem.num_nodes, problem.pipelines, problem.stages
    rates_NN = np.minimum(problem.bytes_per_s_NN, problem.bytes_per_s_NN.T)
    left, right = np.triu_indices(N, k=1)
    fastest_first = np.argsort(-rates_NN[left, right], kind="stable")
    group_of = list(range(N))
    members = {node: [node] for node in range(N)}
    for first, second in zip(
        left[fastest_first].tolist(), right[fastest_first].tolist(), strict=True
    ):
        mine, theirs = group_of[first], group_of[second]
        if mine == theirs:
            continue
        for node in members[theirs]:
            group_of[node] = mine
        members[mine] += members.pop(theirs)
        if len(members) == 1:
            break
    (line,) = members.values()
    pipelines = np.array(line)
    rings = pipelines.copy()
    rings[: R * S] = pipelines[: R * S].reshape(S, R).T.ravel()
    return rings, pipelines


def _best_of_all(
    cost: _Cost, start: Order, *, bound: float, deadline_s: float
) -> tuple[Order, float, float]:
    """Try every order while time lasts; also return the bound, raised to the best of all."""
    best, best_s = start, cost(start)[0]
    every = itertools.permutations(range(len(start)), cost.problem.num_used_nodes)
    for number, nodes in enumerate(every):
        if number % CLOCK_STEPS == 0 and time.perf_counter() >= deadline_s:
            return best, best_s, bound
        order = np.array(nodes)
        value_s, _ = cost(order)
        if value_s < best_s:
            best, best_s = order, value_s
    return best, best_s, best_s


def _anneal(cost: _Cost, start: Order, *, enough: float, deadline_s: float) -> tuple[Order, float]:
    rng = np.random.default_rng(SEED)
    here, (best_s, here_s) = start, cost(start)
    best = here
    if len(start) < 2:
        return best, best_s
    steps = min(MOST_STEPS, STEPS_PER_NODE * len(start))
    cooling = LAST_TEMPERATURE_RATIO ** (1.0 / steps)
    temperature_s = FIRST_TEMPERATURE_RATIO * here_s
    for step in range(steps):
        if best_s <= enough or (step % CLOCK_STEPS == 0 and time.perf_counter() >= deadline_s):
            break
        there = _moved(here, rng)
        value_s, there_s = cost(there)
        worse_s = there_s - here_s
        if worse_s <= 0.0 or rng.random() < math.exp(-worse_s / max(temperature_s, 1e-300)):
            here, here_s = there, there_s
            if value_s < best_s:
                best, best_s = here, value_s
        temperature_s *= cooling
    return best, best_s


def _moved(order: Order, rng: np.random.Generator) -> Order:
    """One of the five moves, on a copy."""
    first, second = sorted(rng.choice(len(order) + 1, size=2, replace=False).tolist())
    move = int(rng.integers(5))
    if move == 0:
        return np.concatenate([order[:first], order[first:second][::-1], order[second:]])
    if move == 1:
        here, there = rng.choice(len(order), size=2, replace=False).tolist()
        swapped = order.copy()
        swapped[[here, there]] = order[[there, here]]
        return swapped
    if move == 2:
        second = first + 1 if first < len(order) else first
        first = second - 1
    stretch, rest = order[first:second], np.concatenate([order[:first], order[second:]])
    place = int(rng.integers(len(rest) + 1))
    if move == 4:
        stretch = stretch[::-1]
    return np.concatenate([rest[:place], stretch, rest[place:]])


def _swap(
    cost: _Cost, order: Order, value: float, *, enough: float, deadline_s: float
) -> tuple[Order, float]:
    """Swap pairs as long as one helps; the first that does is taken."""
    improved = True
    while improved and value > enough:
        improved = False
        for first in range(min(cost.problem.num_used_nodes, len(order) - 1)):
            if time.perf_counter() >= deadline_s:
                return order, value
            for second in range(first + 1, len(order)):
                swapped = order.copy()
                swapped[[first, second]] = order[[second, first]]
                swapped_s, _ = cost(swapped)
                if swapped_s < value:
                    order, value, improved = swapped, swapped_s, True
    return order, value
