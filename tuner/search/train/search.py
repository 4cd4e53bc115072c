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
the solver of layouts decides those for the finalists (finalists.py).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.plans.train import Space
from tuner.search.layout_groups import rows_of_layouts
from tuner.search.progress import PlanningEvent
from tuner.search.settings import SearchSettings
from tuner.search.train.bounds import Allowed, degrees_bound_s
from tuner.search.train.candidate_prices import (
    CandidatePrices,
    candidate_bound_in_memory_s,
    candidate_bound_s,
    price,
    price_batch,
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
from tuner.search.train.space_size import OptionTables, SearchedSpace, space
from tuner.units import format_count, format_ratio, format_s

SEEDS = 8
"""Partial rows of every pipeline size that are visited before all others."""

FIRST_DISPATCH = 128
"""Dispatch settings that are expanded before the threshold is read again; the number doubles each
time, up to `MOST_DISPATCH`."""
MOST_DISPATCH = 2048

FIRST_GROUPS = 256
"""Groups of the no-recompute and the recompute level that are expanded before the threshold is read
again; the number doubles each time, up to `MOST_GROUPS`."""
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
    run = _Run(problem, settings, known)
    watch = run.settings.watch
    watch(space_event(run.legal, sum(run.illegal.values()), run.degrees))
    bound_N = partial_bounds_s(run.problem, run.options, run.degrees)
    watch(bounds_event(len(bound_N), float(bound_N.min(initial=np.inf))))
    order = np.argsort(bound_N, kind="stable")
    order = order[bound_N[order] <= run.threshold_s()]
    if not np.isfinite(run.settings.below_s):
        seeds = run.seeds(order)
        run.visit(run.open_partials(seeds))
        order = order[~np.isin(order, seeds)]
    pending: list[Rows] = []
    for batch in batches(order, run.degrees.num_pairs_N, first=run.first_rows()):
        batch_bound_s = float(bound_N[batch[0]])
        if batch_bound_s > run.threshold_s():
            break
        done = int((bound_N < batch_bound_s).sum())
        watch(run.batch_event(batch_bound_s, done, len(bound_N), "partial rows"))
        if run.deadline.is_over:
            run.leave_open_partials(batch, batch_bound_s)
            continue
        pending += run.open_partials(batch[bound_N[batch] <= run.threshold_s()])
    run.visit(pending)
    outcome = run.summary()
    watch(result_event(outcome))
    return outcome


class _Run:
    """The state of one search; lives as long as the call that made it."""

    def __init__(
        self, problem: TrainProblem, settings: SearchSettings, known: SearchedSpace | None
    ) -> None:
        self.problem = problem
        self.settings = settings
        self.deadline = settings.begin()
        self.options = option_space(problem)
        self.degrees = legal_degrees(problem)
        is_whole = known is None
        self.legal, self.illegal = space(self.options, self.degrees) if is_whole else (0, {})
        self.tables = OptionTables(options=self.options, known=known)
        self.solutions: Solutions | None = None
        self.bound_s = np.inf
        self.priced = 0
        self.open = 0

    def first_rows(self) -> int:
        """Rows of the first batch: few while there is no threshold yet."""
        return MOST_ROWS if np.isfinite(self.settings.below_s) else FIRST_ROWS

    def batch_event(self, batch_bound_s: float, done: int, total: int, what: str) -> PlanningEvent:
        bound_s = min(batch_bound_s, self.bound_s)
        return batch_event(
            f"{done} of {total} {what}", best_s=self.best_s(), bound_s=bound_s, priced=self.priced
        )

    def seeds(self, order: Ints) -> Ints:
        """The best partial rows of every pipeline size, to get a threshold early."""
        pipeline = self.degrees.dense_D["pipeline"][self.degrees.partials_N["dense"][order]]
        return order[rank_within(pipeline) < SEEDS]

    def open_partials(self, partials: Ints) -> list[Rows]:
        """Bound the rows of some partial rows; drop what cannot fit."""
        rows = self.degrees.rows(partials)
        return [
            part
            for table, chosen in self.tables.by_kind(rows)
            for part in self.open_kind(table, take_rows(rows, chosen))
        ]

    def open_kind(self, table: OptionTable, rows: Table) -> Iterator[Rows]:
        has_threshold = bool(np.isfinite(self.threshold_s()))
        if not has_threshold:
            # There is no threshold yet, so first drop what cannot fit.
            rows = take_rows(rows, self.rows_that_may_fit(table, rows))
        if not len(rows["tensor"]):
            return
        allowed = allowed_by(self.options, table)
        bound_CD = self.dispatch_bounds_s(table, table.leading_D, rows, allowed)
        kept = np.flatnonzero(bound_CD.min(axis=1) <= self.threshold_s())
        if has_threshold:
            kept = kept[self.rows_that_may_fit(table, take_rows(rows, kept))]
        if len(kept):
            rows = take_rows(rows, kept)
            yield Rows(table=table, rows=rows, bound_CD=bound_CD[kept], allowed=allowed)

    def rows_that_may_fit(self, table: OptionTable, rows: Table) -> Ints:
        return np.flatnonzero(row_fits(self.problem, self.options, table, rows))

    def visit(self, opened_rows: list[Rows]) -> None:
        """Visit rows in the order of their bounds, a batch at a time."""
        parts = merge_by_table(opened_rows)
        least_C = np.concatenate([np.zeros(0), *(part.least_C for part in parts)])
        part_C = np.repeat(np.arange(len(parts)), [len(part.least_C) for part in parts])
        place_C = np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(len(p.least_C)) for p in parts)]
        )
        order = np.argsort(least_C, kind="stable")
        for batch in batches(order, np.ones_like(order), first=self.first_rows()):
            batch_bound_s = float(least_C[batch[0]])
            if batch_bound_s > self.threshold_s():
                return
            done = int((least_C < batch_bound_s).sum())
            self.settings.watch(self.batch_event(batch_bound_s, done, len(order), "rows"))
            here = batch[least_C[batch] <= self.threshold_s()]
            for index in np.unique(part_C[here]):
                rows = parts[index].taken(place_C[here[part_C[here] == index]])
                if self.deadline.is_over:
                    self.leave_open_rows(rows)
                else:
                    self.visit_dispatch_level(self.bounded(rows))

    def bounded(self, rows: Rows) -> Rows:
        """Bound rows at every dispatch setting."""
        table = rows.table
        others = tuple(f for f in range(len(table.dispatch_DA)) if f not in table.leading_D)
        bound_CD = np.empty((len(rows.least_C), len(table.dispatch_DA)))
        bound_CD[:, table.leading_D] = rows.bound_CD
        bound_CD[:, others] = self.dispatch_bounds_s(table, others, rows.rows, rows.allowed)
        return replace(rows, bound_CD=bound_CD)

    def dispatch_bounds_s(
        self, table: OptionTable, dispatch: Sequence[int], rows: Table, allowed: Allowed
    ) -> Floats:
        """Bound every row at every given dispatch setting, [C, D], as one batch of candidates."""
        count = len(rows["tensor"])
        if not dispatch:
            return np.empty((count, 0))
        every = {name: np.repeat(column, len(dispatch)) for name, column in rows.items()}
        options_CA = np.tile(table.dispatch_DA[list(dispatch)], (count, 1))
        return self.bounds(with_options(table, every, options_CA), allowed).reshape(
            count, len(dispatch)
        )

    def bounds(self, candidates: Candidates, allowed: Allowed) -> Floats:
        batch = price_batch(self.problem, self.options, candidates)
        units = batch.times.taken(batch.time_of_C)
        return degrees_bound_s(self.problem, batch.strategies, units, allowed)

    def visit_dispatch_level(self, rows: Rows) -> None:
        """Visit the dispatch settings of rows in the order of their bounds, a few at a time."""
        table, best_s = rows.table, np.full(len(rows.bound_CD), np.inf)
        row, dispatch = np.nonzero(rows.bound_CD <= self.threshold_s())
        order = np.argsort(rows.bound_CD[row, dispatch], kind="stable")
        row, dispatch = row[order], dispatch[order]
        start, num_settings = 0, FIRST_DISPATCH
        while start < len(row):
            if self.deadline.is_over:
                self.leave_open_dispatch(rows, row[start:], dispatch[start:])
                return
            stop, num_settings = start + num_settings, min(2 * num_settings, MOST_DISPATCH)
            here, of = row[start:stop], dispatch[start:stop]
            wanted = rows.bound_CD[here, of] <= np.minimum(self.threshold_s(), best_s[here])
            here, of = here[wanted], of[wanted]
            some = take_rows(rows.rows, here)
            fits_without = fits_without_recompute(self.problem, self.options, table, some, of)
            self.visit_no_recompute_level(rows, here[fits_without], of[fits_without], best_s)
            self.visit_recompute_level(rows, here[~fits_without], of[~fits_without], best_s)
            start = stop

    def visit_no_recompute_level(
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
        bound_s = candidate_bound_s(self.problem, self.options, every)
        kept = np.flatnonzero(bound_s <= np.minimum(self.threshold_s(), best_s[row]))
        kept = kept[no_recompute_level_fits(self.problem, self.options, every.taken(kept))]
        for now in self.in_order(kept, bound_s, row, best_s):
            of, place = expand_runs(
                table.count_of_N[no_recompute[now]], table.start_of_N[no_recompute[now]]
            )
            self.visit_options(rows, row[now][of], place, best_s)

    def visit_recompute_level(self, rows: Rows, row: Ints, dispatch: Ints, best_s: Floats) -> None:
        """Bound recomputation settings, drop those that cannot fit, expand the rest."""
        table = rows.table
        row, recompute = expand_dispatch_level(
            row, dispatch, table.dispatch_of_R, num_dispatch=len(table.dispatch_DA)
        )
        if not len(row):
            return
        every = with_options(table, take_rows(rows.rows, row), table.recompute_RA[recompute])
        bound_s = self.bounds(every, rows.allowed)
        kept = np.flatnonzero(bound_s <= np.minimum(self.threshold_s(), best_s[row]))
        some = take_rows(rows.rows, row[kept])
        kept = kept[recompute_level_fits(self.problem, self.options, table, some, recompute[kept])]
        for now in self.in_order(kept, bound_s, row, best_s):
            of, place = expand_runs(
                table.count_of_R[recompute[now]], table.start_of_R[recompute[now]]
            )
            self.visit_options(rows, row[now][of], table.by_recompute_T[place], best_s)

    def in_order(self, kept: Ints, bound_s: Floats, row: Ints, best_s: Floats) -> Iterator[Ints]:
        """Yield groups below the threshold, those of the lowest bounds first."""
        kept = kept[np.argsort(bound_s[kept], kind="stable")]
        start, num_groups = 0, FIRST_GROUPS
        while start < len(kept):
            now = kept[start : start + num_groups]
            start, num_groups = start + num_groups, min(2 * num_groups, MOST_GROUPS)
            now = now[bound_s[now] <= np.minimum(self.threshold_s(), best_s[row[now]])]
            if len(now):
                yield now

    def visit_options(self, rows: Rows, row: Ints, option: Ints, best_s: Floats) -> None:
        """Bound options, then price those left in time and memory; keep the best of every row.

        Layers are moved where memory requires it.
        """
        table = rows.table
        candidates = with_options(table, take_rows(rows.rows, row), table.options_TA[option])
        bound_s = candidate_bound_s(self.problem, self.options, candidates)
        kept = np.flatnonzero(bound_s <= np.minimum(self.threshold_s(), best_s[row]))
        kept = kept[may_fit(self.problem, self.options, candidates.taken(kept))]
        kept = kept[np.argsort(bound_s[kept], kind="stable")]
        is_first = rank_within(row[kept]) < PRICED_FIRST
        for part in (kept[is_first], kept[~is_first]):
            now = part[bound_s[part] <= np.minimum(self.threshold_s(), best_s[row[part]])]
            if not len(now):
                continue
            some, least_s = candidates.taken(now), bound_s[now]
            prices = price(self.problem, self.options, some, is_moved_to_fit=True)
            self.priced += len(some)
            if len(prices.full):
                least_s[prices.full] = candidate_bound_in_memory_s(
                    self.problem, self.options, some.taken(prices.full)
                )
            self.record(some, row[now], prices, best_s)
            # It may be faster in another pipeline layout than in the one it was priced in.
            self.bound_s = min(self.bound_s, float(least_s.min()))

    def best_s(self) -> float:
        return np.inf if self.solutions is None else float(self.solutions.step_s[0])

    def record(
        self,
        candidates: Candidates,
        row: Ints,
        prices: CandidatePrices,
        best_s: Floats,
    ) -> None:
        """Keep the best option of every row that fits with one."""
        fitting = np.flatnonzero(prices.peak_bytes <= self.problem.memory_limit_bytes)
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
        self.solutions = new if self.solutions is None else self.solutions.concat_best(new)

    def threshold_s(self) -> float:
        """Step time above which nothing is of interest.

        The slower one of the K-th best layout and of the ties with the best.
        """
        if self.solutions is None:
            return self.settings.below_s
        rows = rows_of_layouts(self.solutions.layouts(), top=self.settings.top)
        if rows is None:
            return self.settings.below_s
        steps_s = self.solutions.step_s
        tie_s = float(steps_s[0]) * (1.0 + self.settings.band_ratio)
        return min(max(float(steps_s[rows - 1]), tie_s), self.settings.below_s)

    def leave_open_partials(self, partials: Ints, bound_s: float) -> None:
        """Out of time: only the bound of these partial rows is known."""
        self.bound_s = min(self.bound_s, bound_s)
        for table, chosen in self.tables.by_kind(self.degrees.rows(partials)):
            self.open += len(chosen) * table.num_legal

    def leave_open_rows(self, rows: Rows) -> None:
        self.bound_s = min(self.bound_s, float(rows.least_C.min()))
        self.open += len(rows.least_C) * rows.table.num_legal

    def leave_open_dispatch(self, rows: Rows, row: Ints, dispatch: Ints) -> None:
        self.bound_s = min(self.bound_s, float(rows.bound_CD[row, dispatch].min()))
        table = rows.table
        options_D = np.bincount(
            table.dispatch_of_N, weights=table.count_of_N, minlength=len(table.dispatch_DA)
        )
        self.open += int(options_D[dispatch].sum())

    def summary(self) -> SearchOutcome:
        solutions = self.solutions
        return SearchOutcome(
            problem=self.problem,
            options=self.options,
            degrees=self.degrees,
            solutions=solutions,
            bound_s=min(self.bound_s, self.best_s()),
            complete_s=0.0 if self.open else self.threshold_s(),
            counts=Space(
                priced=self.priced,
                bounded=max(0, self.legal - self.priced - self.open),
                illegal=sum(self.illegal.values()),
                open=self.open,
            ),
            solve_s=self.deadline.elapsed_s,
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
