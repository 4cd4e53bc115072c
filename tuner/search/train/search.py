"""Branch and bound over parallel degrees and execution options.

Each level fixes more of a decision and has a lower bound on the step time:

    level          fixed                                          checks
    partial row    degrees but the expert degrees                 bound        bounds.py
    row            all degrees                                    memory       memory.py
    dispatch       + dispatcher, a2a_overlap, cuda_graph          bound        bounds.py
    no_recompute   + every knob but recomputation and chunks      bound        candidate_prices.py
    recompute      dispatch, recomputation and chunks only        bound, memory
    option         every knob                                     bound, then time and memory

Partial rows are opened in the order of their bounds, then their rows in the order of theirs. A
dispatch setting that fits in memory without recomputation is expanded into the no-recompute level,
any other into the recompute level (option_table.py). A node is pruned if the driver
(tuner/search/driver.py) finds its bound above the threshold (the step time of the K-th best layout,
each row at its best option), or if no pipeline layout of it fits in memory. Bounds never decrease
from level to level. Work is done in batches, and the threshold is updated after each.

Letters: C candidates or rows, D dispatch settings, A axes, N partial rows. Not covered: options
that differ between stages; the solver of layouts decides those for the finalists (finalists.py).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tuner.arrays import Floats, Ints
from tuner.search.driver import BestFirst
from tuner.search.layout_groups import Layout
from tuner.search.progress import PlanningEvent
from tuner.search.settings import SearchSettings
from tuner.search.train.bounds import Allowed, allowed_by, degrees_bound_s, partial_bounds_s
from tuner.search.train.candidate_prices import (
    CandidatePrices,
    candidate_bound_in_memory_s,
    candidate_bound_s,
    price,
    price_batch,
)
from tuner.search.train.candidates import Candidates
from tuner.search.train.degrees import Degrees, Table, expand_runs, legal_degrees, take_rows
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
from tuner.search.train.search_result import SearchOutcome, Solutions
from tuner.search.train.space_size import OptionTables, SearchedSpace, space
from tuner.units import format_count, format_ratio, format_s

SEEDS = 8
"""Partial rows of every pipeline size that are visited before all others."""

ROWS = (512, 32_768)
"""Rows of the first batch, and of the largest one."""

DISPATCH = (128, 2048)
"""Dispatch settings that are expanded before the threshold is read again, first and at most."""

GROUPS = (256, 2048)
"""Groups of the no-recompute and the recompute level that are expanded before the threshold is read
again, first and at most."""

PRICED_FIRST = 4
"""Options of each row, those of the lowest bounds, that are priced before all others."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Rows of one kind of degrees, with the options that they allow."""

    table: OptionTable
    rows: Table
    bound_CD: Floats
    """Lower bounds of the step in seconds, for the leading dispatch settings or for all."""
    allowed: Allowed

    @property
    def least_C(self) -> Floats:
        """Bound of every row, whatever its dispatch setting."""
        least: Floats = self.bound_CD.min(axis=1)
        return least

    def taken(self, chosen: Ints) -> "Rows":
        """Select some of them."""
        return replace(self, rows=take_rows(self.rows, chosen), bound_CD=self.bound_CD[chosen])


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
    watch = settings.watch
    watch(space_event(run.legal, sum(run.illegal.values()), run.degrees))
    bound_N = partial_bounds_s(problem, run.options, run.degrees)
    watch(bounds_event(len(bound_N), float(bound_N.min(initial=np.inf))))
    seeds = run.seeds(bound_N)
    run.visit(run.open_partials(seeds))
    left = np.setdiff1d(np.arange(len(bound_N)), seeds)
    pending: list[Rows] = []
    for batch in run.best_first(
        bound_N[left],
        sizes=run.row_sizes(),
        weight_N=run.degrees.num_pairs_N[left],
        count=lambda rest: run.num_options(left[rest]),
    ):
        run.report(bound_N, float(bound_N[left[batch[0]]]), "partial rows")
        pending += run.open_partials(left[batch])
    run.visit(pending)
    outcome = SearchOutcome(
        problem=problem,
        options=run.options,
        degrees=run.degrees,
        solutions=run.solutions,
        proof=run.prove(legal=run.legal, illegal=sum(run.illegal.values())),
    )
    watch(result_event(outcome))
    return outcome


class _Run(BestFirst):
    """The state of one search; lives as long as the call that made it."""

    def __init__(
        self, problem: TrainProblem, settings: SearchSettings, known: SearchedSpace | None
    ) -> None:
        super().__init__(settings)
        self.problem = problem
        self.options = option_space(problem)
        self.degrees = legal_degrees(problem)
        is_whole = known is None
        self.legal, self.illegal = space(self.options, self.degrees) if is_whole else (0, {})
        self.tables = OptionTables(options=self.options, known=known)
        self.solutions: Solutions | None = None

    def ranked(self) -> tuple[Floats, Iterator[Layout]]:
        """Return the steps of the solutions and their layouts, fastest first."""
        if self.solutions is None:
            return np.zeros(0), iter(())
        return self.solutions.step_s, self.solutions.layouts()

    def row_sizes(self) -> tuple[int, int]:
        """Sizes of batches of rows: small ones first while there is no threshold yet."""
        return ROWS[int(np.isfinite(self.settings.below_s))], ROWS[1]

    def num_options(self, partials: Ints) -> int:
        """Count the legal decisions of some partial rows."""
        kinds = self.tables.by_kind(self.degrees.rows(partials))
        return sum(len(chosen) * table.num_legal for table, chosen in kinds)

    def report(self, bound_s: Floats, batch_bound_s: float, what: str) -> None:
        """Report the state before a batch."""
        done = int((bound_s < batch_bound_s).sum())
        state = _incumbent(self.best_s(), min(batch_bound_s, self.bound_s, self.open_s))
        text = f"{done} of {len(bound_s)} {what}, {self.priced} decisions priced, {state}"
        self.settings.watch(PlanningEvent(stage="search", text=text))

    def seeds(self, bound_s: Floats) -> Ints:
        """The best partial rows of every pipeline size, to get a threshold where there is none."""
        order = np.argsort(bound_s, kind="stable")
        pipeline = self.degrees.dense_D["pipeline"][self.degrees.partials_N["dense"][order]]
        seeds: Ints = order[(rank_within(pipeline) < SEEDS) & np.isinf(self.settings.below_s)]
        return seeds

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
        kept = np.flatnonzero(self.within(bound_CD.min(axis=1)))
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
        lengths = np.array([len(part.least_C) for part in parts], dtype=np.int64)
        part_C, place_C = expand_runs(lengths, np.zeros_like(lengths))
        num_legal_P = np.array([part.table.num_legal for part in parts], dtype=np.int64)
        for here in self.best_first(
            least_C, sizes=self.row_sizes(), count=lambda rest: int(num_legal_P[part_C[rest]].sum())
        ):
            self.report(least_C, float(least_C[here[0]]), "rows")
            for index in np.unique(part_C[here]):
                rows = parts[index].taken(place_C[here[part_C[here] == index]])
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
        row, dispatch = np.nonzero(self.within(rows.bound_CD))
        options_D = np.bincount(
            table.dispatch_of_N, weights=table.count_of_N, minlength=len(table.dispatch_DA)
        )
        for now in self.best_first(
            rows.bound_CD[row, dispatch],
            sizes=DISPATCH,
            incumbent_s=lambda nodes: best_s[row[nodes]],
            count=lambda rest: int(options_D[dispatch[rest]].sum()),
        ):
            here, of = row[now], dispatch[now]
            some = take_rows(rows.rows, here)
            fits_without = fits_without_recompute(self.problem, self.options, table, some, of)
            self.visit_no_recompute_level(rows, here[fits_without], of[fits_without], best_s)
            self.visit_recompute_level(rows, here[~fits_without], of[~fits_without], best_s)

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
        kept = np.flatnonzero(self.within(bound_s, best_s[row]))
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
        kept = np.flatnonzero(self.within(bound_s, best_s[row]))
        some = take_rows(rows.rows, row[kept])
        kept = kept[recompute_level_fits(self.problem, self.options, table, some, recompute[kept])]
        for now in self.in_order(kept, bound_s, row, best_s):
            of, place = expand_runs(
                table.count_of_R[recompute[now]], table.start_of_R[recompute[now]]
            )
            self.visit_options(rows, row[now][of], table.by_recompute_T[place], best_s)

    def in_order(self, kept: Ints, bound_s: Floats, row: Ints, best_s: Floats) -> Iterator[Ints]:
        """Yield groups below the threshold, those of the lowest bounds first."""
        for now in self.best_first(
            bound_s[kept], sizes=GROUPS, incumbent_s=lambda nodes: best_s[row[kept[nodes]]]
        ):
            yield kept[now]

    def visit_options(self, rows: Rows, row: Ints, option: Ints, best_s: Floats) -> None:
        """Bound options, then price those left in time and memory; keep the best of every row.

        Layers are moved where memory requires it.
        """
        table = rows.table
        candidates = with_options(table, take_rows(rows.rows, row), table.options_TA[option])
        bound_s = candidate_bound_s(self.problem, self.options, candidates)
        kept = np.flatnonzero(self.within(bound_s, best_s[row]))
        kept = kept[may_fit(self.problem, self.options, candidates.taken(kept))]
        kept = kept[np.argsort(bound_s[kept], kind="stable")]
        is_first = rank_within(row[kept]) < PRICED_FIRST
        for part in (kept[is_first], kept[~is_first]):
            now = part[self.within(bound_s[part], best_s[row[part]])]
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


def result_event(search: SearchOutcome) -> PlanningEvent:
    """The result of the search."""
    best_s = math.inf if search.solutions is None else float(search.solutions.step_s[0])
    counts = search.proof.counts
    left = f", {format_count(counts.open)} left open" if counts.open else ""
    return PlanningEvent(
        stage="search",
        text=f"{counts.priced} priced, {format_count(counts.bounded)} bounded{left}, "
        f"{_incumbent(best_s, search.proof.bound_s)}",
    )


def _incumbent(best_s: float, bound_s: float) -> str:
    if math.isinf(best_s):
        return "nothing that fits"
    gap = max(0.0, 1.0 - min(bound_s, best_s) / best_s)
    return f"best {format_s(best_s)}, gap {format_ratio(gap)}"


def with_options(table: OptionTable, rows: Table, options_CA: Ints) -> Candidates:
    """Rows with an option each, as candidates."""
    return Candidates(rows=rows, options=table.columns(options_CA))


def merge_by_table(parts: list[Rows]) -> list[Rows]:
    """Merge parts of the same kind of degrees."""
    by_table: dict[int, list[Rows]] = {}
    for part in parts:
        by_table.setdefault(id(part.table), []).append(part)
    return [
        replace(
            same[0],
            rows={n: np.concatenate([rows.rows[n] for rows in same]) for n in same[0].rows},
            bound_CD=np.concatenate([rows.bound_CD for rows in same]),
        )
        for same in by_table.values()
    ]


def expand_dispatch_level(
    row: Ints, dispatch: Ints, dispatch_of: Ints, *, num_dispatch: int
) -> tuple[Ints, Ints]:
    """Every group of the dispatch settings, with the row that it belongs to."""
    groups_F = [np.flatnonzero(dispatch_of == f) for f in range(num_dispatch)]
    repeats = np.array([len(groups_F[f]) for f in dispatch], dtype=np.int64)
    groups = np.concatenate([np.zeros(0, dtype=np.int64), *(groups_F[f] for f in dispatch)])
    return np.repeat(row, repeats), groups


def rank_within(group: Ints) -> Ints:
    """0, 1, ... for the entries of each group, in the order given."""
    order = np.argsort(group, kind="stable")
    starts = np.r_[True, np.diff(group[order]) != 0]
    position = np.arange(len(group))
    first = np.maximum.accumulate(np.where(starts, position, 0))
    rank = np.empty(len(group), dtype=np.int64)
    rank[order] = position - first
    return rank
