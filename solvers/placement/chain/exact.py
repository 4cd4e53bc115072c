"""Dynamic program over the layers of a chain, for few experts per layer; proves the optimum.

    f(l + 1, y) = min over x of f(l, x) + cost of the pair (x, y)

A state describes one layer. Under the three costs of `hierarchy.py` it is which experts are
co-located (`co_location.py`), and the naming of ranks is a separate assignment at every pair: 8
experts on 8 ranks of one node are one state, on 2 nodes of 4 they are 35. Otherwise, and for the
most-loaded pair of ranks, it is a whole placement of the layer. States that break a load limit are
left out, so infeasibility is proven too. With O(X^2) a pair of layers for X states; beyond
`MOST_STATES`, or out of time, nothing is claimed. For one expert a rank on one node every pair of
layers is an independent assignment, of any size.

Letters: L layers, T = L - 1 pairs, E experts, G ranks, X states.
"""

import math
import time
from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt

from solvers.placement.chain.co_location import enumerate_states
from solvers.placement.chain.co_location import num_states as num_states_of
from solvers.placement.chain.hierarchy import Hierarchy, hierarchy_of
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Floats, Ints, Placement
from solvers.placement.single import all_assignments, placed
from solvers.placement.start_placement import TOLERANCE_RATIO, num_assignments
from solvers.result import Claim, Status

MOST_STATES: Final = 2_600
"""2,520 placements of 8 experts on 4 ranks are within it: 50 MB a pair of layers."""

NOTHING_KNOWN: Final[Claim[Placement]] = Claim(
    status=Status.UNKNOWN, solution=None, bound=-math.inf
)

AT_ONCE: Final = 8_192
"""Numbers of an array that a processor's inner cache holds with some of its like: pairs of layers
with few states are priced together."""

Allowed = npt.NDArray[np.bool_]


def solve(problem: ChainProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return the optimum, the proof that there is none, or nothing where states are too many."""
    deadline_s = time.perf_counter() + time_limit_s
    shape = _shape(problem)
    if shape is not None and num_states_of(shape) <= MOST_STATES:
        return _by_co_location(problem, shape, deadline_s)
    if num_assignments(problem.ranks) <= MOST_STATES:
        return _by_placement(problem, deadline_s)
    return NOTHING_KNOWN


def num_states(problem: ChainProblem) -> float:
    """Return how many states of a layer the program has."""
    shape = _shape(problem)
    assignments = num_assignments(problem.ranks)
    return assignments if shape is None else min(assignments, float(num_states_of(shape)))


def _shape(problem: ChainProblem) -> Hierarchy | None:
    return hierarchy_of(problem) if problem.measure is Measure.TOTAL else None


def _by_co_location(problem: ChainProblem, shape: Hierarchy, deadline_s: float) -> Claim[Placement]:
    states = enumerate_states(shape)
    allowed_LR = _within(problem, problem.load_LE @ states.in_set_RE.T)
    allowed_LX = np.asarray(allowed_LR[:, states.set_XNK].all(axis=(2, 3)))

    at_once = max(1, AT_ONCE // len(states.set_BK) ** 2)

    def paid_XXT(first: int) -> Floats:
        flow_TEE = problem.flow_TEE[first : first + at_once]
        unsaved_T = shape.other_node * flow_TEE.sum(axis=(1, 2))
        return np.asarray(unsaved_T - states.savings_XXT(flow_TEE))

    return _claimed(
        _shortest(allowed_LX, paid_XXT, deadline_s),
        lambda state_L: states.named_LE(problem.flow_TEE, state_L),
    )


def _by_placement(problem: ChainProblem, deadline_s: float) -> Claim[Placement]:
    rank_XE = all_assignments(tuple(problem.ranks.slots_G.tolist()))
    on_rank_GXE = (rank_XE == np.arange(problem.ranks.num_ranks)[:, None, None]).astype(np.float64)
    load_GXL = on_rank_GXE @ problem.load_LE.T
    allowed_LX = np.asarray(_within(problem, load_GXL.transpose(2, 0, 1)).all(axis=1))
    return _claimed(
        _shortest(
            allowed_LX, lambda pair: _paid_XX(problem, pair, on_rank_GXE)[..., None], deadline_s
        ),
        lambda state_L: rank_XE[state_L],
    )


def _claimed(
    shortest: tuple[Status, float, Ints], ranks_of: Callable[[Ints], Ints]
) -> Claim[Placement]:
    status, cost, state_L = shortest
    solution = placed(ranks_of(state_L)) if status is Status.OPTIMAL else None
    return Claim(status=status, solution=solution, bound=cost)


def _within(problem: ChainProblem, load_L: Floats) -> Allowed:
    """Where a load, with layers along the first axis, is within its layer's limit."""
    if problem.most_load_L is None:
        return np.ones(load_L.shape, dtype=bool)
    limit_L = problem.most_load_L * (1.0 + TOLERANCE_RATIO)
    return np.asarray(load_L <= limit_L.reshape(-1, *[1] * (load_L.ndim - 1)))


def _paid_XX(problem: ChainProblem, pair: int, on_rank_GXE: Floats) -> Floats:
    """Cost of a pair of layers, for every two whole placements."""
    num_ranks, num_states, _ = on_rank_GXE.shape
    paid_XX = np.zeros((num_states, num_states))
    for here in range(num_ranks):
        out_XE = on_rank_GXE[here] @ problem.flow_TEE[pair]
        if problem.measure is Measure.TOTAL:
            paid_XX += out_XE @ np.tensordot(problem.cost_GG[here], on_rank_GXE, axes=1).T
            continue
        for there in range(num_ranks):
            paid = problem.cost_GG[here, there] * (out_XE @ on_rank_GXE[there].T)
            np.maximum(paid_XX, paid, out=paid_XX)
    return paid_XX


def _shortest(
    allowed_LX: Allowed, paid_XXT: Callable[[int], Floats], deadline_s: float
) -> tuple[Status, float, Ints]:
    """The cheapest path through the layers: its cost, and the state of each.

    `paid_XXT` prices one pair of layers or more, from the given one on.
    """
    nothing = np.zeros(0, dtype=np.int64)
    if not allowed_LX.any(axis=1).all():
        return Status.INFEASIBLE, math.inf, nothing
    best_X = np.where(allowed_LX[0], 0.0, np.inf)
    came_from: list[Ints] = []
    while len(came_from) < len(allowed_LX) - 1:
        if time.perf_counter() >= deadline_s:
            return Status.UNKNOWN, -math.inf, nothing
        for paid_XX in np.moveaxis(paid_XXT(len(came_from)), -1, 0):
            through_XX = best_X[:, None] + paid_XX
            came_from.append(through_XX.argmin(axis=0))
            best_X = np.where(allowed_LX[len(came_from)], through_XX.min(axis=0), np.inf)
    state_L = [int(best_X.argmin())]
    for before_X in reversed(came_from):
        state_L.append(int(before_X[state_L[-1]]))
    return Status.OPTIMAL, max(0.0, float(best_X.min())), np.array(state_L[::-1])
