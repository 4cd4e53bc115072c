"""Branch and bound over all columns and choices of pools: bounds first, partitions for the rest.

Rows of degrees are visited in the order of a bound that holds for every way to run them. A row's
columns (degrees and a way) are bounded over every choice of pools (bounds.py), then the partition
of their layers is solved in the order of these bounds, until the next one is no better than the
best of the K-th best layout. So

    space = priced (solved, or proven to fit in no partition) + bounded + illegal + open

where `open` is what time ran out on; ways that another beats by mere order (waytable.py) count as
bounded. The bound of the whole search is the least of what was solved and what was left.

Letters: E entries, one per column and choice of pools.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.incumbents import LAYOUT
from tuner.planner.analytic.option_table import WayTable
from tuner.planner.analytic.rules import Ints
from tuner.planner.heterogeneous.bounds import (
    can_fit,
    least_pace_s,
    least_pipeline_s,
    least_step_s,
    once_parts,
    positions,
    rooms,
)
from tuner.planner.heterogeneous.build_problem import PoolsQuestion
from tuner.planner.heterogeneous.chains import Chain, Column, solved
from tuner.planner.heterogeneous.space import Pools, PoolsSpace, pools_space
from tuner.planner.heterogeneous.stage_prices import Floats, OnPool, held_on, layer_bytes, priced_on
from tuner.planner.layout_groups import rows_of_layouts

FIRST_ROWS: Final = 16
"""Rows of the first batch; every further one may be twice as large, up to `MOST_ROWS`."""
MOST_ROWS: Final = 512

MOST_COLUMNS: Final = 16_384
"""Columns that are bounded at once."""

BATCH: Final = 256
"""Entries that are priced together before they are solved one by one."""

SHORTEST_SOLVE_S: Final = 1.0
"""What a solve may take even when the search is late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to search."""

    top: int = 4
    """Rows of degrees whose best chain is wanted."""
    time_limit_s: float = 60.0
    below_s: float = math.inf
    """Slower chains are of no interest; `bound_s` then speaks of faster ones alone."""
    method: str = "exact"
    """A partition solver of solvers/registry.py."""
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Counts:
    """Where every decision went."""

    priced: int
    bounded: int
    illegal: int
    open: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Search:
    """What was found: the best chain of each row of degrees, best first."""

    question: PoolsQuestion
    space: PoolsSpace
    chains: tuple[Chain, ...]
    bound_s: float
    """No decision is faster; infinite when nothing fits."""
    complete_s: float
    """Every row whose best chain is no slower than this is among those found."""
    counts: Counts
    solve_s: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entries:
    """Columns of one table of ways with one choice of pools each, bounded."""

    table: WayTable
    rows_E: Ints
    way_E: Ints
    pools_E: Ints
    bound_s_E: Floats
    """Infinite where nothing fits."""

    def __len__(self) -> int:
        return len(self.rows_E)


def search(question: PoolsQuestion, settings: Settings) -> Search:
    """Find the fastest chains and prove how far from optimal they can be."""
    run = _Run(question, settings)
    return run.result()


class _Run:
    """The state of one search; lives as long as the call that made it."""

    def __init__(self, question: PoolsQuestion, settings: Settings) -> None:
        self._question = question
        self._settings = settings
        self._start_s = settings.clock()
        self._space = pools_space(question)
        self._tables = list(self._space.tables())
        self._parts: list[_Entries] = []
        self._starts = np.zeros(1, dtype=np.int64)
        self._best: dict[int, Chain] = {}
        self._bound_s = math.inf
        self._least_open_s = math.inf
        self._visited = 0
        self._refused = 0
        self._open = 0

    def result(self) -> Search:
        """Search."""
        table_of_N, bound_s_N = _row_bounds(self._question, self._space, self._tables)
        order = np.argsort(bound_s_N, kind="stable")
        order = order[np.isfinite(bound_s_N[order])]
        start, most = 0, FIRST_ROWS
        while start < len(order) and bound_s_N[order[start]] <= self._wanted_s():
            batch = order[start : start + most]
            start, most = start + most, min(2 * most, MOST_ROWS)
            batch = batch[bound_s_N[batch] <= self._wanted_s()]
            if self._is_late():
                self._leave_rows(batch, table_of_N[batch], float(bound_s_N[batch[0]]))
            else:
                self._visit_rows(batch, table_of_N[batch])
        return self._summary()

    def _visit_rows(self, rows: Ints, table_of: Ints) -> None:
        """Bound every column of some rows over every choice of pools, and solve the best."""
        self._parts = [
            part
            for index, (table, _) in enumerate(self._tables)
            for part in _entries(self._question, self._space, table, rows[table_of == index])
        ]
        self._starts = np.cumsum([0, *(len(part) for part in self._parts)])
        bound_s_E = np.concatenate([np.zeros(0), *(part.bound_s_E for part in self._parts)])
        self._refused += int(np.isinf(bound_s_E).sum())
        order = np.argsort(bound_s_E, kind="stable")
        order = order[np.isfinite(bound_s_E[order])]
        for start in range(0, len(order), BATCH):
            batch = order[start : start + BATCH]
            if bound_s_E[batch[0]] > self._wanted_s():
                break
            wanted = [one for one in batch if bound_s_E[one] <= self._wanted_of_s(int(one))]
            self._visit_batch(np.array(wanted, dtype=np.int64))

    def _leave_rows(self, rows: Ints, table_of: Ints, least_s: float) -> None:
        """Time is over: nothing is known of these but their bound."""
        self._least_open_s = min(self._least_open_s, least_s)
        for index, (table, _) in enumerate(self._tables):
            ways = table.num_legal * len(self._space.pools)
            self._open += ways * int((table_of == index).sum())

    def _is_late(self) -> bool:
        elapsed_s = self._settings.clock() - self._start_s
        return elapsed_s > self._settings.time_limit_s

    def _visit_batch(self, batch: Ints) -> None:
        """Bound entries again, now by where memory leaves room at every position, and solve."""
        by_pools: dict[int, list[int]] = {}
        for entry in batch:
            part, at = self._at(int(entry))
            by_pools.setdefault(int(part.pools_E[at]), []).append(int(entry))
        found = [
            (bound_s, entry, column)
            for index, entries in by_pools.items()
            for bound_s, entry, column in self._columns(entries, self._space.pools[index])
        ]
        for bound_s, entry, column in sorted(found, key=lambda one: one[:2]):
            if bound_s <= self._wanted_of_s(entry):
                self._visit(entry, column, bound_s)

    def _visit(self, entry: int, column: Column, least_s: float) -> None:
        left_s = self._settings.time_limit_s - (self._settings.clock() - self._start_s)
        if left_s <= 0.0:
            self._open += 1
            self._least_open_s = min(self._least_open_s, least_s)
            return
        self._visited += 1
        found = solved(
            column,
            self._question.cluster,
            method=self._settings.method,
            time_limit_s=max(SHORTEST_SOLVE_S, left_s),
        )
        self._bound_s = min(self._bound_s, max(found.bound_s, least_s))
        if found.chain is None:
            return
        part, at = self._at(entry)
        row = int(part.rows_E[at])
        if row not in self._best or found.chain.price.step_s < self._best[row].price.step_s:
            self._best[row] = found.chain

    def _wanted_s(self) -> float:
        """Slower than this is of no interest: not the best of the K best layouts."""
        best = sorted((chain.price.step_s, row) for row, chain in self._best.items())
        columns = [self._space.rows_N[name] for name in LAYOUT]
        layouts = (tuple(int(column[row]) for column in columns) for _, row in best)
        rows = rows_of_layouts(layouts, top=self._settings.top)
        below_s = self._settings.below_s
        return below_s if rows is None else min(below_s, best[rows - 1][0])

    def _wanted_of_s(self, entry: int) -> float:
        """The same of one entry, which must also be able to beat what its row has already."""
        part, at = self._at(entry)
        chain = self._best.get(int(part.rows_E[at]))
        return self._wanted_s() if chain is None else min(self._wanted_s(), chain.price.step_s)

    def _columns(self, entries: list[int], chosen: Pools) -> Iterator[tuple[float, int, Column]]:
        """Price entries over the same pools together; hand them out one by one, with bounds."""
        places = [self._at(entry) for entry in entries]
        row = np.array([part.rows_E[at] for part, at in places])
        ways = np.stack([part.table.ways_TA[part.way_E[at]] for part, at in places])
        candidates = Candidates(
            rows={name: column[row] for name, column in self._space.rows_N.items()},
            ways=places[0][0].table.columns(ways),
        )
        pools = _on_pools(self._question, self._space, candidates, chosen)
        bytes_of = [layer_bytes(on) for on in pools]
        once_of = [once_parts(on) for on in pools]
        longest = positions(pools)
        rooms_P = [
            rooms(on, part, positions=longest) for on, part in zip(pools, bytes_of, strict=True)
        ]
        pace_s, bound_s = least_pace_s(pools, rooms_P), least_step_s(pools, rooms_P)
        for index, entry in enumerate(entries):
            yield (
                float(bound_s[index]),
                entry,
                Column(
                    candidate=candidates.taken(np.array([index])),
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

    def _summary(self) -> Search:
        chains = sorted(self._best.values(), key=lambda chain: chain.price.step_s)
        space = self._space
        bound_s = min(self._bound_s, self._least_open_s)
        return Search(
            question=self._question,
            space=space,
            chains=tuple(chains),
            bound_s=min(bound_s, chains[0].price.step_s) if chains else bound_s,
            complete_s=min(self._wanted_s(), self._least_open_s),
            counts=Counts(
                priced=self._visited + self._refused,
                bounded=space.num_legal - self._visited - self._refused - self._open,
                illegal=sum(space.illegal.values()),
                open=self._open,
            ),
            solve_s=self._settings.clock() - self._start_s,
        )


def _row_bounds(
    question: PoolsQuestion, space: PoolsSpace, tables: list[tuple[WayTable, Ints]]
) -> tuple[Ints, Floats]:
    """The table of every row, and what none of its ways over any pools can beat."""
    count = len(space.rows_N["tensor"])
    table_of_N, bound_s_N = np.zeros(count, dtype=np.int64), np.full(count, math.inf)
    for index, (table, rows) in enumerate(tables):
        table_of_N[rows] = index
        if not len(table.ways_TA):
            continue
        frames = table.frame_FA[list(table.leading_F)]
        for some in _pieces(rows, len(frames)):
            columns = space.columns(table, some, frames)
            on_pools = _on_pools(question, space, columns, range(question.num_pools))
            bound_s = least_pipeline_s(on_pools, [None] * len(on_pools))
            bound_s_N[some] = bound_s.reshape(len(some), len(frames)).min(axis=1)
    return table_of_N, bound_s_N


def _entries(
    question: PoolsQuestion, space: PoolsSpace, table: WayTable, rows: Ints
) -> Iterator[_Entries]:
    """Bound every column over every choice of pools; what cannot fit is bounded by infinity."""
    ways = len(table.ways_TA)
    for some in _pieces(rows, ways):
        columns = space.columns(table, some, table.ways_TA)
        held = [
            held_on(own, pool, space.ways, columns)
            for own, pool in zip(question.of_pool, question.cluster.pools, strict=True)
        ]
        longest = positions([on for on, _ in held])
        rooms_P = [rooms(on, part, positions=longest) for on, part in held]
        # What all pools together have no room for takes no time to price.
        fits = np.flatnonzero(can_fit([on for on, _ in held], rooms_P))
        every = range(question.num_pools) if len(fits) else ()
        on_pools = _on_pools(question, space, columns.taken(fits), every)
        rooms_P = [room_JC[:, fits] for room_JC in rooms_P]
        for index, chosen in enumerate(space.pools):
            bound_s_E = np.full(len(columns), math.inf)
            if len(fits):
                bound_s_E[fits] = least_step_s(
                    [on_pools[pool] for pool in chosen], [rooms_P[pool] for pool in chosen]
                )
            yield _Entries(
                table=table,
                rows_E=np.repeat(some, ways),
                way_E=np.tile(np.arange(ways), len(some)),
                pools_E=np.full(len(columns), index),
                bound_s_E=bound_s_E,
            )


def _pieces(rows: Ints, ways: int) -> Iterator[Ints]:
    """Cut rows so that their columns are not too many at once."""
    step = max(1, MOST_COLUMNS // max(1, ways))
    for start in range(0, len(rows) if ways else 0, step):
        yield rows[start : start + step]


def _on_pools(
    question: PoolsQuestion, space: PoolsSpace, columns: Candidates, chosen: Iterable[int]
) -> tuple[OnPool, ...]:
    return tuple(
        priced_on(question.of_pool[pool], question.cluster.pools[pool], space.ways, columns)
        for pool in chosen
    )
