"""Branch and bound over all candidates and choices of pools: bounds first, partitions for the rest.

Rows of degrees are visited in the order of a bound that holds for all their options. A row's
candidates (degrees and options) are bounded over every choice of pools (bounds.py), then the
partition of their layers is solved in the order of these bounds, until the next bound is no better
than the K-th best layout. So

    space = priced (solved, or proven to fit in no partition) + bounded + illegal + open

where `open` is what the time limit left unexplored; dominated options (option_table.py) count as
bounded. The bound of the whole search is the least over what was solved and what is open.

Letters: E entries, one per candidate and choice of pools.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.plans.train import Space
from tuner.search.layout_groups import rows_of_layouts
from tuner.search.settings import SearchSettings
from tuner.search.train.candidates import Candidates
from tuner.search.train.incumbents import LAYOUT
from tuner.search.train.option_table import OptionTable
from tuner.search.train.pools.bounds import (
    can_fit,
    least_pace_s,
    least_pipeline_s,
    once_parts,
    positions,
    rooms,
    step_bound_s,
)
from tuner.search.train.pools.build_problem import PoolsProblem
from tuner.search.train.pools.chains import Chain, PoolsCandidate, solve_chain
from tuner.search.train.pools.space import Pools, PoolsSpace, pools_space
from tuner.search.train.pools.stage_prices import (
    PoolPricing,
    layer_bytes,
    price_memory_on,
    price_on,
)

FIRST_ROWS: Final = 16
"""Rows of the first batch; each further batch may be twice as large, up to `MOST_ROWS`."""
MOST_ROWS: Final = 512

MAX_CANDIDATES: Final = 16_384
"""Candidates that are bounded at once."""

BATCH: Final = 256
"""Entries that are priced together before they are solved one by one."""

SHORTEST_SOLVE_S: Final = 1.0
"""Minimum time limit of a solve, even at the end of the search."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolsSearchOutcome:
    """The best chain of each row of degrees, best first, with the proof."""

    problem: PoolsProblem
    space: PoolsSpace
    chains: tuple[Chain, ...]
    bound_s: float
    """Lower bound of all decisions' steps in seconds; infinite when nothing fits."""
    complete_s: float
    """Seconds of a step up to which `chains` has all rows whose best chain is no slower."""
    counts: Space
    solve_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entries:
    """Candidates of one table of options with one choice of pools each, bounded."""

    table: OptionTable
    rows_E: Ints
    option_E: Ints
    pools_E: Ints
    bound_s_E: Floats
    """Infinite where nothing fits."""

    def __len__(self) -> int:
        return len(self.rows_E)


def search(problem: PoolsProblem, settings: SearchSettings) -> PoolsSearchOutcome:
    """Find the fastest chains and bound their distance from the optimum."""
    run = _PoolsRun(problem, settings)
    return run.result()


class _PoolsRun:
    """The state of one search; lives as long as the call that made it."""

    def __init__(self, problem: PoolsProblem, settings: SearchSettings) -> None:
        self._problem = problem
        self._settings = settings
        self._deadline = settings.begin()
        self._space = pools_space(problem)
        self._tables = list(self._space.tables())
        self._parts: list[_Entries] = []
        self._starts = np.zeros(1, dtype=np.int64)
        self._best: dict[int, Chain] = {}
        self._bound_s = math.inf
        self._least_open_s = math.inf
        self._visited = 0
        self._refused = 0
        self._open = 0

    def result(self) -> PoolsSearchOutcome:
        """Run the search."""
        table_of_N, bound_s_N = _row_bounds(self._problem, self._space, self._tables)
        order = np.argsort(bound_s_N, kind="stable")
        order = order[np.isfinite(bound_s_N[order])]
        start, num_rows = 0, FIRST_ROWS
        while start < len(order) and bound_s_N[order[start]] <= self._threshold_s():
            batch = order[start : start + num_rows]
            start, num_rows = start + num_rows, min(2 * num_rows, MOST_ROWS)
            batch = batch[bound_s_N[batch] <= self._threshold_s()]
            if self._deadline.is_over:
                self._skip_rows(table_of_N[batch], float(bound_s_N[batch[0]]))
            else:
                self._visit_rows(batch, table_of_N[batch])
        return self._summary()

    def _visit_rows(self, rows: Ints, table_of: Ints) -> None:
        """Bound every candidate of some rows over every choice of pools, and solve the best."""
        self._parts = [
            part
            for index, (table, _) in enumerate(self._tables)
            for part in _entries(self._problem, self._space, table, rows[table_of == index])
        ]
        self._starts = np.cumsum([0, *(len(part) for part in self._parts)])
        bound_s_E = np.concatenate([np.zeros(0), *(part.bound_s_E for part in self._parts)])
        self._refused += int(np.isinf(bound_s_E).sum())
        order = np.argsort(bound_s_E, kind="stable")
        order = order[np.isfinite(bound_s_E[order])]
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            if bound_s_E[batch[0]] > self._threshold_s():
                break
            wanted = [
                entry for entry in batch if bound_s_E[entry] <= self._entry_threshold_s(int(entry))
            ]
            self._visit_batch(np.array(wanted, dtype=np.int64))

    def _skip_rows(self, table_of: Ints, least_s: float) -> None:
        """Out of time: count rows, given by their tables, as open, with their bound."""
        self._least_open_s = min(self._least_open_s, least_s)
        for index, (table, _) in enumerate(self._tables):
            num_options = table.num_legal * len(self._space.pools)
            self._open += num_options * int((table_of == index).sum())

    def _visit_batch(self, batch: Ints) -> None:
        """Bound entries again, now with the memory at every position, and solve them."""
        by_pools: dict[int, list[int]] = {}
        for entry in batch:
            part, at = self._at(int(entry))
            by_pools.setdefault(int(part.pools_E[at]), []).append(int(entry))
        by_bound = [
            (bound_s, entry, candidate)
            for index, entries in by_pools.items()
            for bound_s, entry, candidate in self._price_entries(entries, self._space.pools[index])
        ]
        for bound_s, entry, candidate in sorted(by_bound, key=lambda priced: priced[:2]):
            if bound_s <= self._entry_threshold_s(entry):
                self._visit(entry, candidate, bound_s)

    def _visit(self, entry: int, candidate: PoolsCandidate, least_s: float) -> None:
        left_s = self._deadline.left_s
        if not left_s:
            self._leave_open(least_s)
            return
        solution = solve_chain(
            candidate,
            self._problem.cluster,
            time_limit_s=max(SHORTEST_SOLVE_S, left_s),
        )
        bound_s = max(solution.bound_s, least_s)
        if solution.chain is None and bound_s < math.inf:
            self._leave_open(bound_s)
            return
        self._visited += 1
        self._bound_s = min(self._bound_s, bound_s)
        if solution.chain is None:
            return
        part, at = self._at(entry)
        row = int(part.rows_E[at])
        if row not in self._best or solution.chain.price.step_s < self._best[row].price.step_s:
            self._best[row] = solution.chain

    def _leave_open(self, least_s: float) -> None:
        """Count one entry as undecided: neither a chain nor a proof that there is none."""
        self._open += 1
        self._least_open_s = min(self._least_open_s, least_s)

    def _threshold_s(self) -> float:
        """Return the seconds of the K-th best layout's step, above which chains are skipped."""
        best = sorted((chain.price.step_s, row) for row, chain in self._best.items())
        columns = [self._space.rows_N[name] for name in LAYOUT]
        layouts = (tuple(int(column[row]) for column in columns) for _, row in best)
        rows = rows_of_layouts(layouts, top=self._settings.top)
        below_s = self._settings.below_s
        return below_s if rows is None else min(below_s, best[rows - 1][0])

    def _entry_threshold_s(self, entry: int) -> float:
        """Return an entry's threshold, in seconds: it must also beat the best chain of its row."""
        part, at = self._at(entry)
        chain = self._best.get(int(part.rows_E[at]))
        return (
            self._threshold_s() if chain is None else min(self._threshold_s(), chain.price.step_s)
        )

    def _price_entries(
        self, entries: list[int], chosen: Pools
    ) -> Iterator[tuple[float, int, PoolsCandidate]]:
        """Price entries over the same pools together; yield them one by one, with bounds."""
        places = [self._at(entry) for entry in entries]
        row = np.array([part.rows_E[at] for part, at in places])
        options = np.stack([part.table.options_TA[part.option_E[at]] for part, at in places])
        candidates = Candidates(
            rows={name: column[row] for name, column in self._space.rows_N.items()},
            options=places[0][0].table.columns(options),
        )
        pools = _on_pools(self._problem, self._space, candidates, chosen)
        bytes_of = [layer_bytes(on) for on in pools]
        once_of = [once_parts(on) for on in pools]
        longest = positions(pools)
        rooms_P = [
            rooms(on, part, positions=longest) for on, part in zip(pools, bytes_of, strict=True)
        ]
        pace_s, bound_s = least_pace_s(pools, rooms_P), step_bound_s(pools, rooms_P)
        for index, entry in enumerate(entries):
            yield (
                float(bound_s[index]),
                entry,
                PoolsCandidate(
                    row=candidates.taken(np.array([index])),
                    chosen=chosen,
                    pools=tuple(on.taken(index) for on in pools),
                    bytes_of=tuple(part.taken(index) for part in bytes_of),
                    once_of=tuple(once.taken(index) for once in once_of),
                    least_pace_s=float(pace_s[index]),
                ),
            )

    def _at(self, entry: int) -> tuple["_Entries", int]:
        part = int(np.searchsorted(self._starts, entry, side="right")) - 1
        return self._parts[part], entry - int(self._starts[part])

    def _summary(self) -> PoolsSearchOutcome:
        chains = sorted(self._best.values(), key=lambda chain: chain.price.step_s)
        space = self._space
        bound_s = min(self._bound_s, self._least_open_s)
        return PoolsSearchOutcome(
            problem=self._problem,
            space=space,
            chains=tuple(chains),
            bound_s=min(bound_s, chains[0].price.step_s) if chains else bound_s,
            complete_s=min(self._threshold_s(), self._least_open_s),
            counts=Space(
                priced=self._visited + self._refused,
                bounded=space.num_legal - self._visited - self._refused - self._open,
                illegal=sum(space.illegal.values()),
                open=self._open,
            ),
            solve_s=self._deadline.elapsed_s,
        )


def _row_bounds(
    problem: PoolsProblem, space: PoolsSpace, tables: list[tuple[OptionTable, Ints]]
) -> tuple[Ints, Floats]:
    """The table of every row, and a bound for all its options over any pools."""
    count = len(space.rows_N["tensor"])
    table_of_N, bound_s_N = np.zeros(count, dtype=np.int64), np.full(count, math.inf)
    for index, (table, rows) in enumerate(tables):
        table_of_N[rows] = index
        if not len(table.options_TA):
            continue
        fastest_options = table.dispatch_DA[list(table.leading_D)]
        for some in _pieces(rows, len(fastest_options)):
            candidates = space.candidates(table, some, fastest_options)
            on_pools = _on_pools(problem, space, candidates, range(problem.num_pools))
            bound_s = least_pipeline_s(on_pools, [None] * len(on_pools))
            bound_s_N[some] = bound_s.reshape(len(some), len(fastest_options)).min(axis=1)
    return table_of_N, bound_s_N


def _entries(
    problem: PoolsProblem, space: PoolsSpace, table: OptionTable, rows: Ints
) -> Iterator[_Entries]:
    """Bound every candidate over every choice of pools; infinite where it cannot fit."""
    num_options = len(table.options_TA)
    for some in _pieces(rows, num_options):
        candidates = space.candidates(table, some, table.options_TA)
        memory_P = [
            price_memory_on(pool_problem, pool, space.options, candidates)
            for pool_problem, pool in zip(problem.by_pool, problem.cluster.pools, strict=True)
        ]
        longest = positions([on for on, _ in memory_P])
        rooms_P = [rooms(on, part, positions=longest) for on, part in memory_P]
        # Do not price candidates that do not fit on all pools together.
        fits = np.flatnonzero(can_fit([on for on, _ in memory_P], rooms_P))
        every = range(problem.num_pools) if len(fits) else ()
        on_pools = _on_pools(problem, space, candidates.taken(fits), every)
        rooms_P = [room_JC[:, fits] for room_JC in rooms_P]
        for index, chosen in enumerate(space.pools):
            bound_s_E = np.full(len(candidates), math.inf)
            if len(fits):
                bound_s_E[fits] = step_bound_s(
                    [on_pools[pool] for pool in chosen], [rooms_P[pool] for pool in chosen]
                )
            yield _Entries(
                table=table,
                rows_E=np.repeat(some, num_options),
                option_E=np.tile(np.arange(num_options), len(some)),
                pools_E=np.full(len(candidates), index),
                bound_s_E=bound_s_E,
            )


def _pieces(rows: Ints, num_options: int) -> Iterator[Ints]:
    """Cut rows into pieces of at most `MAX_CANDIDATES` candidates."""
    step = max(1, MAX_CANDIDATES // max(1, num_options))
    for start in range(0, len(rows) if num_options else 0, step):
        yield rows[start : start + step]


def _on_pools(
    problem: PoolsProblem, space: PoolsSpace, candidates: Candidates, chosen: Iterable[int]
) -> tuple[PoolPricing, ...]:
    return tuple(
        price_on(problem.by_pool[pool], problem.cluster.pools[pool], space.options, candidates)
        for pool in chosen
    )
