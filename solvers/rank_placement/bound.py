"""What no placement can be faster than, from the matrix alone.

Pipelines. Every hop leaves a node of its own, so the R (S - 1) hops together cost at least the sum
of that many smallest row minima of the hop matrix, and the slowest pipeline at least the mean. The
same mean holds for computing: the R S fastest nodes are used at best, and the sum of the pipelines'
slowest nodes is least when they are cut in order of speed into blocks of S. Apart from the mean,
some pipeline holds the slowest node that must be used.

Rings. At a threshold t keep the links that are at least as fast. A ring lies in one connected part,
so parts of size n hold at most n // R rings; where these are fewer than S, some ring needs a link
slower than t. The slowest t that allows S rings bounds the slowest link of the slowest ring, and at
least the lightest gradients pass it.

Both hold for any placement, so does their sum. Letters: N nodes, R pipelines, S stages.
"""

import numpy as np
import numpy.typing as npt

from solvers.rank_placement.problem import RankPlacementProblem


def lower_bound_s(problem: RankPlacementProblem) -> float:
    """Seconds that no placement can do without."""
    return _pipelines_s(problem) + _rings_s(problem)


def _pipelines_s(problem: RankPlacementProblem) -> float:
    R, S = problem.pipelines, problem.stages
    repeats = problem.num_microbatches - 1
    fastest = np.sort(problem.stage_s_N)[: R * S]
    block_sum = float(fastest.reshape(R, S)[:, -1].sum())
    leaving_N = np.sort(_hop_s_NN(problem).min(axis=1)) if S > 1 else np.zeros(problem.num_nodes)
    hops = problem.rounds * float(leaving_N[: R * (S - 1)].sum())
    mean_s = (float(fastest.sum()) + repeats * block_sum + hops) / R
    slowest = float(fastest[-1])
    its_hops = problem.rounds * float(leaving_N[: S - 1].sum())
    with_slowest_s = slowest * (1 + repeats) + float(fastest[: S - 1].sum()) + its_hops
    return max(mean_s, with_slowest_s)


def _hop_s_NN(problem: RankPlacementProblem) -> npt.NDArray[np.float64]:
    one_way_NN = problem.hop_bytes / problem.bytes_per_s_NN
    both_NN: npt.NDArray[np.float64] = one_way_NN + one_way_NN.T
    np.fill_diagonal(both_NN, np.inf)
    return both_NN


def _rings_s(problem: RankPlacementProblem) -> float:
    R = problem.pipelines
    if R == 1:
        return 0.0
    rates_NN = problem.bytes_per_s_NN.copy()
    np.fill_diagonal(rates_NN, 0.0)
    thresholds = np.unique(rates_NN[rates_NN > 0.0])
    low, high = 0, len(thresholds) - 1
    while low < high:
        middle = (low + high + 1) // 2
        if _rings_held(rates_NN >= thresholds[middle], R) >= problem.stages:
            low = middle
        else:
            high = middle - 1
    volume = 2.0 * (R - 1) / R * float(problem.gradient_bytes_S.min())
    return volume / float(thresholds[low])


def _rings_held(linked_NN: npt.NDArray[np.bool_], ring: int) -> int:
    """How many rings of this many nodes the connected parts have room for."""
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
