"""Branch and bound over all candidates and choices of pools: bounds first, partitions for the rest.

Three levels of nodes, each visited best first by the driver (tuner/search/driver.py):

    row         degrees, over any options and pools            bound       bounds.py
    entry       + options and a choice of pools                bound       bounds.py
    candidate   the same, with the memory at every position    bound, then its partition is solved

Entries that fit in no partition count as priced, dominated options (option_table.py) as bounded.

Letters: E entries, one per candidate and choice of pools; N rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.config.shapes import taken
from tuner.search.driver import ONE_BY_ONE, BestFirst, Proof
from tuner.search.layout_groups import Layout
from tuner.search.settings import SearchSettings
from tuner.search.train.candidates import Candidates
from tuner.search.train.degrees import take_rows
from tuner.search.train.option_table import OptionTable
from tuner.search.train.pools.bounds import (
    can_fit,
    least_pipeline_s,
    rooms_on,
    step_bound_s,
)
from tuner.search.train.pools.build_problem import PoolsProblem
from tuner.search.train.pools.chains import Chain, PoolsCandidate, pools_candidates, solve_chain
from tuner.search.train.pools.space import PoolsSpace, pools_space
from tuner.search.train.pools.stage_prices import PoolPricing, price_memory_on, price_on
from tuner.search.train.search_result import LAYOUT

ROWS: Final = (16, 512)
"""Rows of the first batch, and of the largest one."""

BATCH: Final = (256, 256)
"""Entries that are priced together before they are solved one by one."""

MAX_CANDIDATES: Final = 16_384
"""Candidates that are bounded at once."""

SHORTEST_SOLVE_S: Final = 1.0
"""Minimum time limit of a solve, even at the end of the search."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolsSearchOutcome:
    """The best chain of each row of degrees, best first, with the proof."""

    problem: PoolsProblem
    space: PoolsSpace
    chains: tuple[Chain, ...]
    proof: Proof


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Entries:
    """Candidates with one choice of pools each, bounded."""

    rows_E: Ints
    option_E: Ints
    pools_E: Ints
    bound_s_E: Floats
    """Infinite where nothing fits."""


def search(problem: PoolsProblem, settings: SearchSettings) -> PoolsSearchOutcome:
    """Find the fastest chains and bound their distance from the optimum."""
    run = _Run(problem, settings)
    bound_s_N = run.row_bounds()
    bounded = np.flatnonzero(np.isfinite(bound_s_N))
    for batch in run.best_first(
        bound_s_N[bounded], sizes=ROWS, count=lambda rest: run.num_decisions(bounded[rest])
    ):
        run.visit_rows(bounded[batch])
    space = run.space
    return PoolsSearchOutcome(
        problem=problem,
        space=space,
        chains=tuple(run.best[row] for row in run.order()),
        proof=run.prove(legal=space.num_legal, illegal=sum(space.illegal.values())),
    )


class _Run(BestFirst):
    """The state of one search."""

    def __init__(self, problem: PoolsProblem, settings: SearchSettings) -> None:
        super().__init__(settings)
        self.problem = problem
        self.space = pools_space(problem)
        count = len(self.space.rows_N["tensor"])
        self.tables = [table for table, _ in self.space.tables]
        self.table_of_N = np.zeros(count, dtype=np.int64)
        for index, (_, rows) in enumerate(self.space.tables):
            self.table_of_N[rows] = index
        self.best: dict[int, Chain] = {}
        self.best_s_N = np.full(count, np.inf)

    def order(self) -> list[int]:
        """Rows with a chain, fastest first."""
        return sorted(self.best, key=lambda row: (self.best_s_N[row], row))

    def ranked(self) -> tuple[Floats, Iterator[Layout]]:
        """Return the steps of the best chains and their layouts, fastest first."""
        order, columns = self.order(), [self.space.rows_N[name] for name in LAYOUT]
        layouts = (tuple(int(column[row]) for column in columns) for row in order)
        return self.best_s_N[order], layouts

    def num_decisions(self, rows: Ints) -> int:
        """Count the legal decisions of some rows."""
        num_legal = np.array([table.num_legal for table in self.tables], dtype=np.int64)
        return int(num_legal[self.table_of_N[rows]].sum()) * len(self.space.pools)

    def row_bounds(self) -> Floats:
        """Bound all options of every row over any pools, in seconds."""
        bound_s_N = np.full(len(self.table_of_N), np.inf)
        for table, rows in self.space.tables:
            fastest_options = table.dispatch_DA[list(table.leading_D)]
            for some in _pieces(rows, len(fastest_options)):
                candidates = self.space.candidates(table, some, fastest_options)
                on_pools = self.on_pools(candidates, range(self.problem.num_pools))
                bound_s = least_pipeline_s(on_pools, [None] * len(on_pools))
                bound_s_N[some] = bound_s.reshape(len(some), len(fastest_options)).min(axis=1)
        return bound_s_N

    def visit_rows(self, rows: Ints) -> None:
        """Bound every candidate of some rows over every choice of pools, and solve the best."""
        parts = [
            part
            for index, table in enumerate(self.tables)
            for part in self.entries(table, rows[self.table_of_N[rows] == index])
        ]
        if not parts:
            return
        entries = _concat(parts)
        bounded = np.isfinite(entries.bound_s_E)
        self.priced += int((~bounded).sum())
        entries = taken(entries, np.flatnonzero(bounded))
        for batch in self.best_first(
            entries.bound_s_E,
            sizes=BATCH,
            incumbent_s=lambda here: self.best_s_N[entries.rows_E[here]],
        ):
            self.visit_entries(taken(entries, np.sort(batch)))

    def entries(self, table: OptionTable, rows: Ints) -> Iterator[_Entries]:
        """Bound every candidate over every choice of pools; infinite where it cannot fit."""
        problem, space, num_options = self.problem, self.space, len(table.options_TA)
        for some in _pieces(rows, num_options):
            candidates = space.candidates(table, some, table.options_TA)
            memory_P, bytes_P = zip(
                *(
                    price_memory_on(pool_problem, pool, space.options, candidates)
                    for pool_problem, pool in zip(
                        problem.by_pool, problem.cluster.pools, strict=True
                    )
                ),
                strict=True,
            )
            rooms_P = rooms_on(memory_P, bytes_P)
            # Do not price candidates that do not fit on all pools together.
            fits = np.flatnonzero(can_fit(memory_P, rooms_P))
            every = range(problem.num_pools) if len(fits) else ()
            on_pools = self.on_pools(candidates.taken(fits), every)
            rooms_P = [room_JC[:, fits] for room_JC in rooms_P]
            for index, chosen in enumerate(space.pools):
                bound_s_E = np.full(len(candidates), np.inf)
                if len(fits):
                    bound_s_E[fits] = step_bound_s(
                        [on_pools[pool] for pool in chosen], [rooms_P[pool] for pool in chosen]
                    )
                yield _Entries(
                    rows_E=np.repeat(some, num_options),
                    option_E=np.tile(np.arange(num_options), len(some)),
                    pools_E=np.full(len(candidates), index),
                    bound_s_E=bound_s_E,
                )

    def visit_entries(self, entries: _Entries) -> None:
        """Bound entries again, now with the memory at every position, and solve them."""
        tables = self.table_of_N[entries.rows_E]
        options = np.stack(
            [
                self.tables[table].options_TA[option]
                for table, option in zip(tables, entries.option_E, strict=True)
            ]
        )
        candidates = Candidates(
            rows=take_rows(self.space.rows_N, entries.rows_E),
            options=self.tables[tables[0]].columns(options),
        )
        bound_s_E = np.empty(len(candidates))
        priced: dict[int, PoolsCandidate] = {}
        for index in np.unique(entries.pools_E):
            chosen, here = self.space.pools[index], np.flatnonzero(entries.pools_E == index)
            some = candidates.taken(here)
            bound_s_E[here], made = pools_candidates(some, chosen, self.on_pools(some, chosen))
            priced |= zip(here.tolist(), made, strict=True)
        for (entry,) in self.best_first(
            bound_s_E,
            sizes=ONE_BY_ONE,
            incumbent_s=lambda here: self.best_s_N[entries.rows_E[here]],
            count=len,
        ):
            self.visit(int(entries.rows_E[entry]), priced[entry], float(bound_s_E[entry]))

    def visit(self, row: int, candidate: PoolsCandidate, least_s: float) -> None:
        """Solve the partition of a candidate; keep the best chain of its row."""
        solution = solve_chain(
            candidate,
            self.problem.cluster,
            time_limit_s=max(SHORTEST_SOLVE_S, self.deadline.left_s),
        )
        bound_s = max(solution.bound_s, least_s)
        if solution.chain is None and bound_s < np.inf:
            self.leave_open(1, bound_s)
            return
        self.priced += 1
        self.bound_s = min(self.bound_s, bound_s)
        if solution.chain is not None and solution.chain.price.step_s < self.best_s_N[row]:
            self.best[row] = solution.chain
            self.best_s_N[row] = solution.chain.price.step_s

    def on_pools(self, candidates: Candidates, chosen: Iterable[int]) -> tuple[PoolPricing, ...]:
        """Price candidates on some pools."""
        problem = self.problem
        return tuple(
            price_on(
                problem.by_pool[pool], problem.cluster.pools[pool], self.space.options, candidates
            )
            for pool in chosen
        )


def _concat(parts: Sequence[_Entries]) -> _Entries:
    return _Entries(
        rows_E=np.concatenate([part.rows_E for part in parts]),
        option_E=np.concatenate([part.option_E for part in parts]),
        pools_E=np.concatenate([part.pools_E for part in parts]),
        bound_s_E=np.concatenate([part.bound_s_E for part in parts]),
    )


def _pieces(rows: Ints, num_options: int) -> Iterator[Ints]:
    """Cut rows into pieces of at most `MAX_CANDIDATES` candidates."""
    step = max(1, MAX_CANDIDATES // max(1, num_options))
    for start in range(0, len(rows) if num_options else 0, step):
        yield rows[start : start + step]
