"""A lower bound on the step time of any placement, from the matrix alone.

Pipelines. Every hop leaves a node of its own, so the R (S - 1) hops together cost at least the sum
of that many smallest row minima of the hop matrix, and the slowest pipeline at least the mean. The
same mean holds for the all-to-all: the R S fastest nodes are used at best, and the sum of the
pipelines' slowest nodes is least when they are cut in order of speed into blocks of S. Apart from
the mean, some pipeline holds the slowest node that must be used.

Rings. At a threshold t keep the links that are at least as fast. A ring lies in one connected part,
so parts of size n hold at most n // R rings; where these are fewer than S, some ring needs a link
slower than t. The slowest t that allows S rings bounds the slowest link of the slowest ring, and at
least the lightest gradients pass it.

All-to-all. Whatever nodes share its block, a node sends to as many others, so its all-to-all takes
at least that many of its fastest links for the stage with the fewest all-to-all bytes.

Reductions over blocks. There are B times as many rings, each B times shorter. A stage with the
slowest ring still needs both of its reductions, the other at best over the fastest link of all.

All hold for any placement, so does their sum. Letters: N nodes, R pipelines, S stages, B pipelines
of a block.
"""

import numpy as np
import numpy.typing as npt

from solvers.rank_placement.problem import RankPlacementProblem


def lower_bound_s(problem: RankPlacementProblem) -> float:
    """Seconds that every placement takes at least."""
    return _pipelines_s(problem) + _rings_s(problem)


def _pipelines_s(problem: RankPlacementProblem) -> float:
    R, S = problem.pipelines, problem.stages
    repeats = problem.num_microbatches - 1
    fastest = np.sort(_all_to_all_s_N(problem))[: R * S]
    block_sum = float(fastest.reshape(R, S)[:, -1].sum())
    leaving_N = np.sort(_hop_s_NN(problem).min(axis=1)) if S > 1 else np.zeros(problem.num_nodes)
    hops = problem.rounds * float(leaving_N[: R * (S - 1)].sum())
    mean_s = (float(fastest.sum()) + repeats * block_sum + hops) / R
    slowest = float(fastest[-1])
    its_hops = problem.rounds * float(leaving_N[: S - 1].sum())
    with_slowest_s = slowest * (1 + repeats) + float(fastest[: S - 1].sum()) + its_hops
    return max(mean_s, with_slowest_s)


def _hop_s_NN(problem: RankPlacementProblem) -> npt.NDArray[np.float64]:
    send_s_NN = problem.hop_bytes / problem.bytes_per_s_NN
    both_NN: npt.NDArray[np.float64] = send_s_NN + send_s_NN.T
    np.fill_diagonal(both_NN, np.inf)
    return both_NN


def _all_to_all_s_N(problem: RankPlacementProblem) -> npt.NDArray[np.float64]:
    slowness_NN = np.sort(1.0 / problem.bytes_per_s_NN, axis=1)
    # The first column is the node itself, which is infinitely near.
    seconds_N: npt.NDArray[np.float64] = slowness_NN[:, : problem.block].sum(axis=1)
    return float(problem.all_to_all_bytes_S.min()) * seconds_N


def _rings_s(problem: RankPlacementProblem) -> float:
    R, B, S = problem.pipelines, problem.block, problem.stages
    if R == 1:
        return 0.0
    rates_NN = problem.bytes_per_s_NN.copy()
    np.fill_diagonal(rates_NN, 0.0)
    fastest = float(rates_NN.max())
    all_bytes = 2.0 * (R - 1) / R * float(problem.gradient_bytes_S.min())
    far_bytes = 2.0 * (R // B - 1) / (R // B) * float(problem.block_gradient_bytes_S.min())
    all_s = all_bytes / _slowest_link(rates_NN, nodes=R, rings=S) + far_bytes / fastest
    if far_bytes <= 0.0:
        return all_s
    far_s = far_bytes / _slowest_link(rates_NN, nodes=R // B, rings=B * S) + all_bytes / fastest
    return max(all_s, far_s)


def _slowest_link(rates_NN: npt.NDArray[np.float64], *, nodes: int, rings: int) -> float:
    """The slowest rate that the slowest of so many rings must use at best."""
    thresholds = np.unique(rates_NN[rates_NN > 0.0])
    low, high = 0, len(thresholds) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _rings_held(rates_NN >= thresholds[middle], nodes) >= rings:
            low = middle
        else:
            high = middle - 1
    return float(thresholds[low])


def _rings_held(linked_NN: npt.NDArray[np.bool_], ring: int) -> int:
    """Return how many rings of this many nodes the connected parts have room for."""
    either_NN = linked_NN | linked_NN.T
    left_N = np.ones(len(linked_NN), dtype=bool)
    rings = 0
    while left_N.any():
        part_N = np.zeros_like(left_N)
        part_N[int(left_N.argmax())] = True
        while True:
            grown_N = part_N | either_NN[part_N].any(axis=0)
            if (grown_N == part_N).all():
                break
            part_N = grown_N
        rings += int(part_N.sum()) // ring
        left_N &= ~part_N
    return rings
