"""Branch and bound over parallel degrees and execution options.

Each level fixes more of a decision and has a lower bound on the step time:

    level          fixed                                          checks
    partial row    degrees but the expert degrees                 bound        root_bound.py
    row            all degrees                                    memory       memory.py
    dispatch       + dispatcher, a2a_overlap, cuda_graph          bound        bounds.py
    no_recompute   + every knob but recomputation and chunks      bound        candidate_prices.py
    recompute      dispatch, recomputation and chunks only        bound, memory
    option         every knob                                     bound, then time and memory

Partial rows are opened in the order of their bounds, then their rows in the order of theirs. A
dispatch setting that fits in memory without recomputation is expanded into the no-recompute level,
any other into the recompute level (option_table.py). A node is pruned if its bound exceeds the
threshold (the step time of the K-th best layout, each row at its best option), or if no pipeline
layout of it fits in memory. Bounds never decrease from level to level, so that

    space = priced + bounded + illegal + open

counts every decision once; `open` is what the time limit left. Work is done in batches of bounded
size, and the threshold is updated after each.

Letters: C candidates, D dispatch settings, A axes. Not covered: options that differ between stages;
the integer program decides those for the finalists (finalists.py).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from tuner.plans.train import Space
from tuner.search.layout_groups import rows_of_layouts
from tuner.search.progress import PlanningEvent
from tuner.search.settings import SearchSettings
from tuner.search.train.bounds import Allowed, degrees_bound_s
from tuner.search.train.candidate_prices import (
    CandidatePrices,
    candidate_bound_in_memory_s,
    candidate_bound_s,
    price_batch,
    price_to_fit,
)
from tuner.search.train.candidates import Candidates
from tuner.search.train.degrees import Degrees, Table, legal_degrees
from tuner.search.train.incumbents import SearchOutcome, Solutions
from tuner.search.train.memory import (
    fits_without_recompute,
    may_fit,
    no_recompute_level_fits,
    recompute_level_fits,
    row_fits,
)
from tuner.search.train.option_table import OptionTable
from tuner.search.train.options import option_space
from tuner.search.train.problem import TrainProblem
from tuner.search.train.root_bound import allowed_by, partial_bounds_s
from tuner.search.train.rows import (
    FIRST_ROWS,
    MOST_ROWS,
    Rows,
    batches,
    expand_dispatch_level,
    expand_runs,
    merge_by_table,
    rank_within,
    take_rows,
    with_options,
)
from tuner.search.train.rules import Ints
from tuner.search.train.space_size import OptionTables, SearchedSpace, space
from tuner.units import format_count, format_ratio, format_s

Floats = npt.NDArray[np.float64]

SEEDS = 8
"""Partial rows of every pipeline size that are visited before all others."""

FIRST_DISPATCH = 128
"""Dispatch settings that are expanded before the threshold is read again; the number doubles each
time, up to `MOST_DISPATCH`."""
MOST_DISPATCH = 2048

FIRST_GROUPS = 256
"""The same for groups of the no-recompute and the recompute level."""
MOST_GROUPS = 2048

PRICED_FIRST = 4
"""Options of each row, those of the lowest bounds, that are priced before all others."""


def search(
    problem: TrainProblem, settings: SearchSettings, *, known: SearchedSpace | None = None
) -> SearchOutcome:
    """Find the fastest decisions that fit, and prove how far from optimal they can be.

    Args:
        problem: what to search.
        settings: how.
        known: a space that was searched before at the same prices. Its decisions are left out, and
            what is not priced is not counted.
    """
    return _Run(problem, settings, known).result()


class _Run:
    """The state of one search; lives as long as the call that made it."""

    def __init__(
        self, problem: TrainProblem, settings: SearchSettings, known: SearchedSpace | None
    ) -> None:
        self._problem = problem
        self._settings = settings
        self._deadline = settings.begin()
        self._options = option_space(problem)
        self._degrees = legal_degrees(problem)
        is_whole = known is None
        self._legal, self._illegal = space(self._options, self._degrees) if is_whole else (0, {})
        self._tables = OptionTables(options=self._options, known=known)
        self._solutions: Solutions | None = None
        self._bound_s = np.inf
        self._priced = 0
        self._open = 0

    def result(self) -> SearchOutcome:
        """Run the search."""
        watch = self._settings.watch
        watch(space_event(self._legal, sum(self._illegal.values()), self._degrees))
        bound_N = partial_bounds_s(self._problem, self._options, self._degrees)
        watch(bounds_event(len(bound_N), float(bound_N.min(initial=np.inf))))
        order = np.argsort(bound_N, kind="stable")
        order = order[bound_N[order] <= self._threshold_s()]
        if not np.isfinite(self._settings.below_s):
            seeds = self._seeds(order)
            self._visit(self._open_partials(seeds))
            order = order[~np.isin(order, seeds)]
        pending: list[Rows] = []
        for batch in batches(order, self._degrees.num_pairs_N, first=self._first_rows()):
            batch_bound_s = float(bound_N[batch[0]])
            if batch_bound_s > self._threshold_s():
                break
            done = int((bound_N < batch_bound_s).sum())
            watch(self._batch_event(batch_bound_s, done, len(bound_N), "partial rows"))
            if self._deadline.is_over:
                self._leave_open_partials(batch, batch_bound_s)
                continue
            pending += self._open_partials(batch[bound_N[batch] <= self._threshold_s()])
        self._visit(pending)
        outcome = self._summary()
        watch(result_event(outcome))
        return outcome

    def _first_rows(self) -> int:
        """Rows of the first batch: few while there is no threshold yet."""
        return MOST_ROWS if np.isfinite(self._settings.below_s) else FIRST_ROWS

    def _batch_event(self, batch_bound_s: float, done: int, total: int, what: str) -> PlanningEvent:
        bound_s = min(batch_bound_s, self._bound_s)
        return batch_event(
            f"{done} of {total} {what}", best_s=self._best_s(), bound_s=bound_s, priced=self._priced
        )

    def _seeds(self, order: Ints) -> Ints:
        """The best partial rows of every pipeline size, to get a threshold early."""
        pipeline = self._degrees.dense_D["pipeline"][self._degrees.partials_N["dense"][order]]
        return order[rank_within(pipeline) < SEEDS]

    def _open_partials(self, partials: Ints) -> list[Rows]:
        """Bound the rows of some partial rows; drop what cannot fit."""
        rows = self._degrees.rows(partials)
        return [
            part
            for table, chosen in self._tables.by_kind(rows)
            for part in self._open_kind(table, take_rows(rows, chosen))
        ]

    def _open_kind(self, table: OptionTable, rows: Table) -> Iterator[Rows]:
        has_threshold = bool(np.isfinite(self._threshold_s()))
        if not has_threshold:
            # There is no threshold yet, so first drop what cannot fit.
            rows = take_rows(rows, self._rows_that_may_fit(table, rows))
        if not len(rows["tensor"]):
            return
        allowed = allowed_by(self._options, table)
        bound_CD = self._dispatch_bounds_s(table, table.leading_D, rows, allowed)
        kept = np.flatnonzero(bound_CD.min(axis=1) <= self._threshold_s())
        if has_threshold:
            kept = kept[self._rows_that_may_fit(table, take_rows(rows, kept))]
        if len(kept):
            rows = take_rows(rows, kept)
            yield Rows(table=table, rows=rows, bound_CD=bound_CD[kept], allowed=allowed)

    def _rows_that_may_fit(self, table: OptionTable, rows: Table) -> Ints:
        return np.flatnonzero(row_fits(self._problem, self._options, table, rows))

    def _visit(self, opened_rows: list[Rows]) -> None:
        """Visit rows in the order of their bounds, a batch at a time."""
        parts = merge_by_table(opened_rows)
        least_C = np.concatenate([np.zeros(0), *(part.least_C for part in parts)])
        part_C = np.repeat(np.arange(len(parts)), [len(part.least_C) for part in parts])
        place_C = np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(len(p.least_C)) for p in parts)]
        )
        order = np.argsort(least_C, kind="stable")
        for batch in batches(order, np.ones_like(order), first=self._first_rows()):
            batch_bound_s = float(least_C[batch[0]])
            if batch_bound_s > self._threshold_s():
                return
            done = int((least_C < batch_bound_s).sum())
            self._settings.watch(self._batch_event(batch_bound_s, done, len(order), "rows"))
            here = batch[least_C[batch] <= self._threshold_s()]
            for index in np.unique(part_C[here]):
                rows = parts[index].taken(place_C[here[part_C[here] == index]])
                if self._deadline.is_over:
                    self._leave_open_rows(rows)
                else:
                    self._visit_dispatch_level(self._bounded(rows))

    def _bounded(self, rows: Rows) -> Rows:
        """Bound rows at every dispatch setting."""
        table = rows.table
        others = tuple(f for f in range(len(table.dispatch_DA)) if f not in table.leading_D)
        bound_CD = np.empty((len(rows.least_C), len(table.dispatch_DA)))
        bound_CD[:, table.leading_D] = rows.bound_CD
        bound_CD[:, others] = self._dispatch_bounds_s(table, others, rows.rows, rows.allowed)
        return replace(rows, bound_CD=bound_CD)

    def _dispatch_bounds_s(
        self, table: OptionTable, dispatch: Sequence[int], rows: Table, allowed: Allowed
    ) -> Floats:
        """Bound every row at every given dispatch setting, [C, D], as one batch of candidates."""
        count = len(rows["tensor"])
        if not dispatch:
            return np.empty((count, 0))
        every = {name: np.repeat(column, len(dispatch)) for name, column in rows.items()}
        options_CA = np.tile(table.dispatch_DA[list(dispatch)], (count, 1))
        return self._bounds(with_options(table, every, options_CA), allowed).reshape(
            count, len(dispatch)
        )

    def _bounds(self, candidates: Candidates, allowed: Allowed) -> Floats:
        batch = price_batch(self._problem, self._options, candidates)
        units = batch.times.taken(batch.time_of_C)
        return degrees_bound_s(self._problem, batch.strategies, units, allowed)

    def _visit_dispatch_level(self, rows: Rows) -> None:
        """Visit the dispatch settings of rows in the order of their bounds, a few at a time."""
        table, best_s = rows.table, np.full(len(rows.bound_CD), np.inf)
        row, dispatch = np.nonzero(rows.bound_CD <= self._threshold_s())
        order = np.argsort(rows.bound_CD[row, dispatch], kind="stable")
        row, dispatch = row[order], dispatch[order]
        start, most = 0, FIRST_DISPATCH
        while start < len(row):
            if self._deadline.is_over:
                self._leave_open_dispatch(rows, row[start:], dispatch[start:])
                return
            stop, most = start + most, min(2 * most, MOST_DISPATCH)
            here, of = row[start:stop], dispatch[start:stop]
            wanted = rows.bound_CD[here, of] <= np.minimum(self._threshold_s(), best_s[here])
            here, of = here[wanted], of[wanted]
            some = take_rows(rows.rows, here)
            fits_without = fits_without_recompute(self._problem, self._options, table, some, of)
            self._visit_no_recompute_level(rows, here[fits_without], of[fits_without], best_s)
            self._visit_recompute_level(rows, here[~fits_without], of[~fits_without], best_s)
            start = stop

    def _visit_no_recompute_level(
        self, rows: Rows, row: Ints, dispatch: Ints, best_s: Floats
    ) -> None:
        """Bound everything but recomputation, then expand what is below the threshold."""
        table = rows.table
        row, no_recompute = expand_dispatch_level(
            row, dispatch, table.dispatch_of_N, num_dispatch=len(table.dispatch_DA)
        )
        if not len(row):
            return
        every = with_options(table, take_rows(rows.rows, row), table.no_recompute_NA[no_recompute])
        bound_s = candidate_bound_s(self._problem, self._options, every)
        kept = np.flatnonzero(bound_s <= np.minimum(self._threshold_s(), best_s[row]))
        kept = kept[no_recompute_level_fits(self._problem, self._options, every.taken(kept))]
        for now in self._in_order(kept, bound_s, row, best_s):
            of, place = expand_runs(
                table.count_of_N[no_recompute[now]], table.start_of_N[no_recompute[now]]
            )
            self._visit_options(rows, row[now][of], place, best_s)

    def _visit_recompute_level(self, rows: Rows, row: Ints, dispatch: Ints, best_s: Floats) -> None:
        """Bound recomputation settings, drop those that cannot fit, expand the rest."""
        table = rows.table
        row, recompute = expand_dispatch_level(
            row, dispatch, table.dispatch_of_R, num_dispatch=len(table.dispatch_DA)
        )
        if not len(row):
            return
        every = with_options(table, take_rows(rows.rows, row), table.recompute_RA[recompute])
        bound_s = self._bounds(every, rows.allowed)
        kept = np.flatnonzero(bound_s <= np.minimum(self._threshold_s(), best_s[row]))
        some = take_rows(rows.rows, row[kept])
        kept = kept[
            recompute_level_fits(self._problem, self._options, table, some, recompute[kept])
        ]
        for now in self._in_order(kept, bound_s, row, best_s):
            of, place = expand_runs(
                table.count_of_R[recompute[now]], table.start_of_R[recompute[now]]
            )
            self._visit_options(rows, row[now][of], table.by_recompute_T[place], best_s)

    def _in_order(self, kept: Ints, bound_s: Floats, row: Ints, best_s: Floats) -> Iterator[Ints]:
        """Yield groups below the threshold, those of the lowest bounds first."""
        kept = kept[np.argsort(bound_s[kept], kind="stable")]
        start, most = 0, FIRST_GROUPS
        while start < len(kept):
            now = kept[start : start + most]
            start, most = start + most, min(2 * most, MOST_GROUPS)
            now = now[bound_s[now] <= np.minimum(self._threshold_s(), best_s[row[now]])]
            if len(now):
                yield now

    def _visit_options(self, rows: Rows, row: Ints, option: Ints, best_s: Floats) -> None:
        """Bound options, then price those left in time and memory; keep the best of every row.

        Layers are moved where memory requires it.
        """
        table = rows.table
        candidates = with_options(table, take_rows(rows.rows, row), table.options_TA[option])
        bound_s = candidate_bound_s(self._problem, self._options, candidates)
        kept = np.flatnonzero(bound_s <= np.minimum(self._threshold_s(), best_s[row]))
        kept = kept[may_fit(self._problem, self._options, candidates.taken(kept))]
        kept = kept[np.argsort(bound_s[kept], kind="stable")]
        is_first = rank_within(row[kept]) < PRICED_FIRST
        for part in (kept[is_first], kept[~is_first]):
            now = part[bound_s[part] <= np.minimum(self._threshold_s(), best_s[row[part]])]
            if not len(now):
                continue
            some, least_s = candidates.taken(now), bound_s[now]
            prices, full = price_to_fit(self._problem, self._options, some)
            self._priced += len(some)
            if len(full):
                least_s[full] = candidate_bound_in_memory_s(
                    self._problem, self._options, some.taken(full)
                )
            self._record(some, row[now], prices, best_s)
            # It may be faster in another pipeline layout than in the one it was priced in.
            self._bound_s = min(self._bound_s, float(least_s.min()))

    def _best_s(self) -> float:
        return np.inf if self._solutions is None else float(self._solutions.step_s[0])

    def _record(
        self,
        candidates: Candidates,
        row: Ints,
        prices: CandidatePrices,
        best_s: Floats,
    ) -> None:
        """Keep the best option of every row that fits with one."""
        fitting = np.flatnonzero(prices.peak_bytes <= self._problem.memory_limit_bytes)
        if not len(fitting):
            return
        order = fitting[np.argsort(prices.step_s[fitting], kind="stable")]
        _, first = np.unique(row[order], return_index=True)
        better = order[first]
        better = better[prices.step_s[better] < best_s[row[better]]]
        best_s[row[better]] = prices.step_s[better]
        new = Solutions(
            candidates=candidates.taken(better),
            step_s=prices.step_s[better],
            peak_bytes=prices.peak_bytes[better],
            layers_PC=prices.layers_PC[:, better],
        )
        self._solutions = new if self._solutions is None else self._solutions.concat_best(new)

    def _threshold_s(self) -> float:
        """Step time above which nothing is of interest.

        The slower one of the K-th best layout and of the ties with the best.
        """
        if self._solutions is None:
            return self._settings.below_s
        rows = rows_of_layouts(self._solutions.layouts(), top=self._settings.top)
        if rows is None:
            return self._settings.below_s
        steps_s = self._solutions.step_s
        tie_s = float(steps_s[0]) * (1.0 + self._settings.band_ratio)
        return min(max(float(steps_s[rows - 1]), tie_s), self._settings.below_s)

    def _leave_open_partials(self, partials: Ints, bound_s: float) -> None:
        """Out of time: only the bound of these partial rows is known."""
        self._bound_s = min(self._bound_s, bound_s)
        for table, chosen in self._tables.by_kind(self._degrees.rows(partials)):
            self._open += len(chosen) * table.num_legal

    def _leave_open_rows(self, rows: Rows) -> None:
        self._bound_s = min(self._bound_s, float(rows.least_C.min()))
        self._open += len(rows.least_C) * rows.table.num_legal

    def _leave_open_dispatch(self, rows: Rows, row: Ints, dispatch: Ints) -> None:
        self._bound_s = min(self._bound_s, float(rows.bound_CD[row, dispatch].min()))
        table = rows.table
        options_D = np.bincount(
            table.dispatch_of_N, weights=table.count_of_N, minlength=len(table.dispatch_DA)
        )
        self._open += int(options_D[dispatch].sum())

    def _summary(self) -> SearchOutcome:
        solutions = self._solutions
        return SearchOutcome(
            problem=self._problem,
            options=self._options,
            degrees=self._degrees,
            solutions=solutions,
            bound_s=min(self._bound_s, self._best_s()),
            complete_s=0.0 if self._open else self._threshold_s(),
            counts=Space(
                priced=self._priced,
                bounded=max(0, self._legal - self._priced - self._open),
                illegal=sum(self._illegal.values()),
                open=self._open,
            ),
            solve_s=self._deadline.elapsed_s,
        )


def space_event(legal: int, illegal: int, degrees: Degrees) -> PlanningEvent:
    """The size of the space, before anything is priced."""
    return PlanningEvent(
        stage="space",
        text=f"{format_count(legal)} legal decisions of {format_count(legal + illegal)}, in "
        f"{format_count(degrees.num_legal)} combinations of degrees",
    )


def bounds_event(partials: int, bound_s: float) -> PlanningEvent:
    """Every partial row has its bound."""
    bound = f", none below {format_s(bound_s)}" if partials else ""
    return PlanningEvent(
        stage="bounds", text=f"{format_count(partials)} partial rows of degrees bounded{bound}"
    )


def batch_event(done: str, *, best_s: float, bound_s: float, priced: int) -> PlanningEvent:
    """The state between two batches."""
    text = f"{done}, {priced} decisions priced, {_incumbent(best_s, bound_s)}"
    return PlanningEvent(stage="search", text=text)


def result_event(search: SearchOutcome) -> PlanningEvent:
    """The result of the search."""
    best_s = math.inf if search.solutions is None else float(search.solutions.step_s[0])
    counts = search.counts
    left = f", {format_count(counts.open)} left open" if counts.open else ""
    return PlanningEvent(
        stage="search",
        text=f"{counts.priced} priced, {format_count(counts.bounded)} bounded{left}, "
        f"{_incumbent(best_s, search.bound_s)}",
    )


def _incumbent(best_s: float, bound_s: float) -> str:
    if math.isinf(best_s):
        return "nothing that fits"
    gap = max(0.0, 1.0 - min(bound_s, best_s) / best_s)
    return f"best {format_s(best_s)}, gap {format_ratio(gap)}"
