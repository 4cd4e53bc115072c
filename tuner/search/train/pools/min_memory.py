"""Minimum-memory candidates, to find what would fit where nothing does.

Rows with their smallest micro-batch, each with the few options that need least memory: any other
candidate needs at least as much, unless its options are cheap in one row and not in another. The
partitions of the most promising ones are solved, so that what is reported does fit.

Letters: C candidates, J positions from the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.search.settings import Deadline
from tuner.search.train.candidates import Candidates
from tuner.search.train.option_table import OptionTable
from tuner.search.train.pools.bounds import (
    can_fit,
    rooms_on,
    single_pool_room,
    spare_layers,
    step_bound_s,
)
from tuner.search.train.pools.build_problem import PoolsProblem
from tuner.search.train.pools.chains import Chain, PoolsCandidate, pools_candidates, solve_chain
from tuner.search.train.pools.space import PoolsSpace
from tuner.search.train.pools.stage_prices import (
    DENSE,
    MOE,
    PoolPricing,
    StageBytes,
    layer_bytes,
    price_on,
)

IN_FLIGHT: Final = (1.0, 4.0, 16.0, 64.0)
"""Micro-batches in flight for each of which the minimum-memory options are kept."""

MOST_TRIED: Final = 8
"""Candidates whose partition is solved: the fastest, and as many with most memory to spare."""

SOLVE_S: Final = 5.0
"""Time limit of one partition."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MinMemoryCandidates:
    """Candidates of one table of options, priced on every pool."""

    candidates: Candidates
    pools: tuple[PoolPricing, ...]
    bytes_of: tuple[StageBytes, ...]

    def under(self, problem: PoolsProblem) -> tuple[tuple[PoolPricing, ...], list[Floats]]:
        """Return the prices under other memory limits and numbers of nodes, and their rooms."""
        pools = tuple(
            replace(on, problem=pool_problem, pool=pool)
            for on, pool_problem, pool in zip(
                self.pools, problem.by_pool, problem.cluster.pools, strict=True
            )
        )
        return pools, rooms_on(pools, self.bytes_of)


def min_memory_candidates(
    problem: PoolsProblem, space: PoolsSpace
) -> tuple[MinMemoryCandidates, ...]:
    """Price the minimum-memory candidates of a space."""
    priced = []
    for table, rows in space.tables:
        cheapest = _min_memory_options(problem, space, table, rows[:1])
        some = _smallest_micro_batches(space, rows)
        priced.append(_priced(problem, space, space.candidates(table, some, cheapest)))
    return tuple(priced)


def fit_anywhere(tables: Sequence[MinMemoryCandidates], problem: PoolsProblem) -> bool:
    """Return whether any candidate may fit under a relaxed problem."""
    return any(bool(can_fit(*table.under(problem)).any()) for table in tables)


def best_chain(
    tables: Sequence[MinMemoryCandidates], problem: PoolsProblem, *, deadline: Deadline
) -> Chain | None:
    """Solve the most promising candidates; None if none fits, or none was solved in time.

    Args:
        tables: candidates, priced as the problem was before it was relaxed.
        problem: relaxed in its memory limits or its numbers of nodes.
        deadline: of the solves.
    """
    priced: list[tuple[float, float, PoolsCandidate]] = []
    for table in tables:
        pools, rooms_P = table.under(problem)
        bound_s_C, spare_C = step_bound_s(pools, rooms_P), spare_layers(pools, rooms_P)
        fits = np.flatnonzero(np.isfinite(bound_s_C))
        # The fastest may fit by the bound only; those with most memory to spare are slow.
        fastest = fits[np.argsort(bound_s_C[fits], kind="stable")[:MOST_TRIED]]
        roomiest = fits[np.argsort(-spare_C[fits], kind="stable")[:MOST_TRIED]]
        some = np.union1d(fastest, roomiest)
        if not len(some):
            continue
        bounds_s, made = pools_candidates(
            table.candidates.taken(some),
            tuple(range(len(pools))),
            [on.taken(some) for on in pools],
        )
        priced += zip(bounds_s.tolist(), spare_C[some].tolist(), made, strict=True)
    by_time = sorted(priced, key=lambda entry: entry[0])[:MOST_TRIED]
    by_room = sorted(priced, key=lambda entry: -entry[1])[:MOST_TRIED]
    best: Chain | None = None
    for bound_s, _, candidate in (*by_time, *by_room):
        if best is not None and bound_s >= best.price.step_s:
            continue
        left_s = deadline.left_s
        if left_s <= 0.0:
            break
        chain = solve_chain(candidate, problem.cluster, time_limit_s=min(SOLVE_S, left_s)).chain
        if chain is not None and (best is None or chain.price.step_s < best.price.step_s):
            best = chain
    return best


def most_layers(tables: Sequence[MinMemoryCandidates], num_pools: int) -> tuple[int, ...]:
    """Common layers that each pool has room for, for the candidate with most room in total."""
    best = np.zeros(num_pools)
    for table in tables:
        room_PC = np.stack(
            [
                single_pool_room(on, sizes)
                for on, sizes in zip(table.pools, table.bytes_of, strict=True)
            ]
        )
        most_PC = room_PC[:, room_PC.sum(axis=0).argmax()]
        best = most_PC if most_PC.sum() > best.sum() else best
    return tuple(int(layers) for layers in best)


def _min_memory_options(
    problem: PoolsProblem, space: PoolsSpace, table: OptionTable, rows: Ints
) -> Ints:
    """The minimum-memory options of a row, for several numbers of micro-batches in flight."""
    every = _priced(problem, space, space.candidates(table, rows, table.options_TA))
    kind = MOE if problem.any_pool.model.num_moe_layers else DENSE
    chosen = {
        int((sizes.without_C + sizes.static_KC[kind] + in_flight * sizes.saved_KC[kind]).argmin())
        for sizes in every.bytes_of
        for in_flight in IN_FLIGHT
    }
    return table.options_TA[sorted(chosen)]


def _smallest_micro_batches(space: PoolsSpace, rows: Ints) -> Ints:
    """Return the rows with the smallest micro-batch among those that differ in it alone."""
    names = [name for name in space.rows_N if name != "micro_batch"]
    order = rows[np.argsort(space.rows_N["micro_batch"][rows], kind="stable")]
    keys = np.stack([space.rows_N[name][order] for name in names])
    _, first = np.unique(keys, axis=1, return_index=True)
    return order[np.sort(first)]


def _priced(
    problem: PoolsProblem, space: PoolsSpace, candidates: Candidates
) -> MinMemoryCandidates:
    pools = tuple(
        price_on(pool_problem, pool, space.options, candidates)
        for pool_problem, pool in zip(problem.by_pool, problem.cluster.pools, strict=True)
    )
    return MinMemoryCandidates(
        candidates=candidates, pools=pools, bytes_of=tuple(layer_bytes(on) for on in pools)
    )
