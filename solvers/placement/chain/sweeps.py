"""Sweeps over all layers that swap experts between ranks under a load limit; for real sizes.

Two starts, the clusters of `clusters.py` and the balanced placement of `start_placement.py`, are
annealed (`annealing.py`): first load above a limit has a price, so that clusters can pass each
other, then it is forbidden. A layer that is still above its limit is repaired by load alone before
the last, strict turns. The better of the two is claimed, with the bound of `bound.py`.

The number of steps is fixed by the size, so equal inputs give equal placements where time suffices;
where it does not, both anneals cool faster. For the most-loaded pair of ranks the total stands in
while annealing, and `most_loaded_swaps.py` descends on the measure itself from what each anneal
gave.

Letters: L layers, E experts, G ranks.
"""

import math
import time
from collections.abc import Iterator
from typing import Final

import numpy as np

from solvers.placement.chain import check
from solvers.placement.chain.annealing import Annealer, Schedule
from solvers.placement.chain.bound import lower_bound
from solvers.placement.chain.clusters import clusters_along_chain
from solvers.placement.chain.flows import Flows
from solvers.placement.chain.most_loaded_swaps import descend
from solvers.placement.chain.problem import ChainProblem, Measure
from solvers.placement.ranks import Ints, Placement
from solvers.placement.single import placed
from solvers.placement.start_placement import fit, rank_loads, repaired
from solvers.result import Claim, Status

SEED: Final = 20_250_206
FROM_CLUSTERS: Final = Schedule(hot=0.15, cold=0.02, over_first=30.0, over_last=3_000.0)
"""Clusters are good already: warm enough to trade them for balance, not to dissolve them."""
FROM_BALANCE: Final = Schedule(hot=0.7, cold=0.02, over_first=30.0, over_last=3_000.0)
STRICT: Final = Schedule(hot=0.02, cold=0.005, over_first=math.inf, over_last=math.inf)
STRICT_RATIO: Final = 0.15
"""Of the steps, at the end and with limits forbidden to pass."""
SWAPS_WEIGHED: Final = 3e7
"""Of one start, at most: some seconds."""
MAX_ROUNDS: Final = 250
"""Times that every pair of ranks meets in every layer, at most; small problems need no more."""
TURNS_OF_A_ROUND: Final = 4
"""A round has so many turns per parity, after each of which the neighbouring layers are
re-priced."""
BOUND_RATIO: Final = 0.3
"""Of the time, for the bound."""
DESCENT_RATIO: Final = 0.5
"""Of a start's time, for descending on the most-loaded pair where that is the measure."""
SEARCH_RATIO: Final = 0.95
"""Of the time, when turns end; the rest is for pricing what was found."""


def solve(problem: ChainProblem, *, time_limit_s: float, threads: int = 1) -> Claim[Placement]:
    """Return the best placement of the sweeps, with the bound of the pairs of layers."""
    started_s = time.perf_counter()
    balanced = fit(problem.load_LE, problem.ranks, problem.most_load_L)
    if not balanced.fits:
        status = Status.INFEASIBLE if balanced.is_proven else Status.UNKNOWN
        bound = math.inf if balanced.is_proven else -math.inf
        return Claim(status=status, solution=None, bound=bound)
    bound = lower_bound(problem, time_limit_s=BOUND_RATIO * time_limit_s)
    best = placed(balanced.rank_LE)
    value = check.objective(problem, best)
    starts = list(_starts(problem, balanced.rank_LE)) if value > bound else []
    for number, (rank_LE, schedule) in enumerate(starts):
        left_s = SEARCH_RATIO * time_limit_s - (time.perf_counter() - started_s)
        if left_s <= 0.0:
            break
        limit_s = left_s / (len(starts) - number)
        swept = placed(_swept(problem, rank_LE, schedule, balanced.rank_LE, limit_s=limit_s))
        swept_value = check.objective(problem, swept)
        if swept_value < value and not check.violations(problem, swept):
            best, value = swept, swept_value
    return Claim(status=Status.FEASIBLE, solution=best, bound=min(bound, value))


def _starts(problem: ChainProblem, balanced_LE: Ints) -> Iterator[tuple[Ints, Schedule]]:
    slots_G = problem.ranks.slots_G
    if problem.num_layers > 1 and (slots_G == slots_G[0]).all():
        clusters_LE = clusters_along_chain(problem.flow_TEE, num_ranks=problem.ranks.num_ranks)
        yield clusters_LE, FROM_CLUSTERS
    yield balanced_LE, FROM_BALANCE


def _swept(
    problem: ChainProblem,
    start_LE: Ints,
    schedule: Schedule,
    balanced_LE: Ints,
    *,
    limit_s: float,
) -> Ints:
    rng = np.random.default_rng(SEED)
    annealer = Annealer(Flows.of(problem), problem.load_LE, problem.ranks, problem.most_load_L, rng)
    rank_LE = start_LE.copy()
    rounds = SWAPS_WEIGHED / max(1, annealer.swaps_of_a_step * annealer.steps_of_a_round)
    rounds = min(rounds, float(MAX_ROUNDS))
    strict_s = STRICT_RATIO * limit_s
    is_total = problem.measure is Measure.TOTAL
    deadline_s = time.perf_counter() + limit_s
    annealed_s = deadline_s - (0.0 if is_total else DESCENT_RATIO * limit_s)
    _anneal(annealer, rank_LE, schedule, rounds, deadline_s=annealed_s - strict_s)
    _settle(problem, rank_LE, balanced_LE, rng)
    _anneal(annealer, rank_LE, STRICT, STRICT_RATIO * rounds, deadline_s=annealed_s)
    if not is_total:
        descend(problem, rank_LE, deadline_s=deadline_s)
    return rank_LE


def _anneal(
    annealer: Annealer, rank_LE: Ints, schedule: Schedule, rounds: float, *, deadline_s: float
) -> None:
    """Turn by turn in place; the clock only hurries what steps would do more slowly."""
    unit = annealer.temperature_unit(rank_LE)
    if unit <= 0.0:
        return
    mean_load = max(float(annealer.load_LE.mean()), np.finfo(float).tiny)
    steps = max(1, annealer.steps_of_a_round // (2 * TURNS_OF_A_ROUND))
    turns = max(2, math.ceil(rounds * annealer.steps_of_a_round / steps))
    started_s = time.perf_counter()
    available_s = max(deadline_s - started_s, 1e-9)
    for turn in range(turns):
        late_ratio = (time.perf_counter() - started_s) / available_s
        if late_ratio >= 1.0:
            return
        temperature, over = schedule.at(max(turn / turns, late_ratio))
        annealer.turn(
            rank_LE,
            turn % 2,
            temperature=temperature * unit,
            over=over * unit / mean_load,
            steps=steps,
        )


def _settle(
    problem: ChainProblem, rank_LE: Ints, balanced_LE: Ints, rng: np.random.Generator
) -> None:
    """Bring every layer within its limit, in place, by load alone."""
    if problem.most_load_L is None:
        return
    num_ranks, limit_L = problem.ranks.num_ranks, problem.most_load_L
    largest_L = rank_loads(problem.load_LE, rank_LE, num_ranks).max(axis=1)
    for layer in np.flatnonzero(largest_L > limit_L):
        load_E, limit = problem.load_LE[layer], float(limit_L[layer])
        row_E = repaired(load_E, rank_LE[layer], limit, rng)
        fits = rank_loads(load_E[None], row_E[None], num_ranks).max() <= limit
        rank_LE[layer] = row_E if fits else balanced_LE[layer]
