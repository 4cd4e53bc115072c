"""Branch and bound over all degrees and ways: bounds first, prices for what they leave.

    cells    degrees without the experts', by the bound of an imagined expert      bounds.py
    rows     with every expert degree: a bound per frame, and whether anything fits
    keepings with all but what is computed again: a bound, and whether anything fits
    ways     a bound; if need be priced in full, in a layout of their own          pricing.py

Cells are unfolded in the order of their bounds. What is bounded by more than is still wanted (the
K-th best row, each row at its best) is left where it stands; so is what fits in no layout. Bounds
only ever grow from level to level, so that

    space = priced + bounded + illegal + open

counts every decision once; `open` is what time ran out on. Work arrives in batches of bounded size,
and the threshold falls after every one.

Letters: C candidates, F frames, G keepings. Not covered: settings that differ between stages, which
the integer program of the finalists decides.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tuner.planner.analytic.axes import Facts
from tuner.planner.analytic.batching import batches, rank_within
from tuner.planner.analytic.bounds import Allowed, least_step_s
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.counting import by_facts, space
from tuner.planner.analytic.degrees import Table, legal_degrees
from tuner.planner.analytic.fitting import fits_somehow
from tuner.planner.analytic.found import Counts, Found, Search
from tuner.planner.analytic.leaning import capped_least_s, price_to_fit
from tuner.planner.analytic.opening import allowed_by, cell_bounds_s
from tuner.planner.analytic.pricing import Prices, batch_of, least_s
from tuner.planner.analytic.question import Question
from tuner.planner.analytic.rules import Ints, Mask
from tuner.planner.analytic.watching import counted, ended, opened, passing
from tuner.planner.analytic.ways import Ways, ways_of
from tuner.planner.analytic.waytable import WayTable, way_table
from tuner.planner.progress import Told, Watch, unwatched

Floats = npt.NDArray[np.float64]

SEEDS = 8
"""Cells of every pipeline size that are visited before all others."""

FIRST_FRAMES = 32
"""Frames of rows whose keepings are bounded before the first look at the threshold; every further
look may be twice as far away, up to `MOST_FRAMES`."""
MOST_FRAMES = 2048

FIRST_KEEPINGS = 64
"""Keepings whose ways are bounded before the first look at the threshold, and so on."""
MOST_KEEPINGS = 2048

WAYS_FIRST = 4
"""Of each row the most promising, priced before all others."""

LEAN_AXES = ("zero_stage", "optimizer_offload", "activation_offload")
"""Axes whose last legal choice holds the fewest bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to search."""

    top: int = 8
    """Rows to return at least, when there are as many."""
    band_ratio: float = 0.0
    """Rows that are slower than the best by no more than this share are found and counted."""
    below_s: float = np.inf
    """Only faster steps than this are of interest."""
    time_limit_s: float = 60.0
    clock: Callable[[], float]
    watch: Watch = unwatched


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """Rows of one kind of degrees, with the ways that they allow."""

    table: WayTable
    rows: Table
    bound_CF: Floats


def search(question: Question, settings: Settings) -> Search:
    """Find the fastest decisions that fit, and prove how far from optimal they can be."""
    return _Run(question, settings).result()


class _Run:
    """The state of one search; lives as long as the call that made it."""

    def __init__(self, question: Question, settings: Settings) -> None:
        self._question = question
        self._settings = settings
        self._start_s = settings.clock()
        self._ways = ways_of(question)
        self._degrees = legal_degrees(question)
        self._legal, self._illegal = space(self._ways, self._degrees)
        self._tables: dict[Facts, WayTable] = {}
        self._found: Found | None = None
        self._bound_s = np.inf
        self._priced = 0
        self._open = 0

    def result(self) -> Search:
        """Search."""
        watch = self._settings.watch
        watch(counted(self._legal, sum(self._illegal.values()), self._degrees))
        bound_N = cell_bounds_s(self._question, self._ways, self._degrees)
        watch(opened(len(bound_N), float(bound_N.min(initial=np.inf))))
        order = np.argsort(bound_N, kind="stable")
        seeds = self._seeds(order)
        self._visit_cells(seeds)
        order = order[~np.isin(order, seeds)]
        for batch in batches(order, self._degrees.num_pairs_N):
            least_s = float(bound_N[batch[0]])
            if least_s > self._wanted_s():
                break
            watch(self._passing(least_s, int((bound_N < least_s).sum())))
            if self._is_late():
                self._leave_cells(batch, least_s)
                continue
            self._visit_cells(batch[bound_N[batch] <= self._wanted_s()])
        found = self._summary()
        watch(ended(found))
        return found

    def _passing(self, least_s: float, done: int) -> Told:
        return passing(
            done,
            self._degrees.num_cells,
            best_s=self._best_s(),
            bound_s=min(least_s, self._bound_s),
            priced=self._priced,
        )

    def _seeds(self, order: Ints) -> Ints:
        """The most promising cells of every pipeline size, so that the threshold falls early."""
        pipeline = self._degrees.dense_D["pipeline"][self._degrees.cells_N["dense"][order]]
        return order[rank_within(pipeline) < SEEDS]

    def _visit_cells(self, cells: Ints) -> None:
        rows = self._degrees.rows(cells)
        for facts, chosen in by_facts(rows):
            table = self._table(facts)
            if len(table.ways_TA):
                self._visit_rows(table, _taken(rows, chosen))

    def _visit_rows(self, table: WayTable, rows: Table) -> None:
        if self._found is None:
            # Nothing is too slow yet, so what cannot fit goes first.
            rows = _taken(rows, np.flatnonzero(self._fits(table, rows)))
        if not len(rows["tensor"]):
            return
        allowed = allowed_by(self._ways, table)
        leading = table.leading_F
        ahead_CF = self._frame_bounds_s(table, leading, rows, allowed)
        kept = np.flatnonzero(ahead_CF.min(axis=1) <= self._wanted_s())
        kept = kept[self._fits(table, _taken(rows, kept))]
        if not len(kept):
            return
        rows = _taken(rows, kept)
        others = tuple(f for f in range(len(table.frame_FA)) if f not in leading)
        bound_CF = np.empty((len(kept), len(table.frame_FA)))
        bound_CF[:, leading] = ahead_CF[kept]
        bound_CF[:, others] = self._frame_bounds_s(table, others, rows, allowed)
        self._visit_frames(_Rows(table=table, rows=rows, bound_CF=bound_CF))

    def _frame_bounds_s(
        self, table: WayTable, frames: Sequence[int], rows: Table, allowed: Allowed
    ) -> Floats:
        """Bound every row in every one of some frames, [C, F], as columns of one batch."""
        count = len(rows["tensor"])
        if not frames:
            return np.empty((count, 0))
        every = {name: np.repeat(column, len(frames)) for name, column in rows.items()}
        ways_CA = np.tile(table.frame_FA[list(frames)], (count, 1))
        return self._bounds(_with_ways(table, every, ways_CA), allowed).reshape(count, len(frames))

    def _bounds(self, candidates: Candidates, allowed: Allowed) -> Floats:
        batch = batch_of(self._question, self._ways, candidates)
        units = batch.times.taken(batch.time_of_C)
        return least_step_s(self._question, batch.strategies, units, allowed)

    def _fits(self, table: WayTable, rows: Table) -> Mask:
        """Rows of which something may fit: at its leanest, in the leanest layout."""
        if not len(rows["tensor"]):
            return np.zeros(0, dtype=np.bool_)
        lean_way = _leanest(self._ways, table)
        candidates = _with_way(table, rows, lean_way)
        return fits_somehow(self._question, self._ways, candidates, is_idle=True)

    def _visit_frames(self, rows: _Rows) -> None:
        """Go through the frames of rows in the order of their bounds, a few at a time."""
        best_s = np.full(len(rows.bound_CF), np.inf)
        row, frame = np.nonzero(rows.bound_CF <= self._wanted_s())
        order = np.argsort(rows.bound_CF[row, frame], kind="stable")
        row, frame = row[order], frame[order]
        start, most = 0, FIRST_FRAMES
        while start < len(row):
            if self._is_late():
                self._leave_frames(rows, row[start:], frame[start:])
                return
            stop, most = start + most, min(2 * most, MOST_FRAMES)
            here, of = row[start:stop], frame[start:stop]
            wanted = rows.bound_CF[here, of] <= np.minimum(self._wanted_s(), best_s[here])
            self._visit_keepings(rows, here[wanted], of[wanted], best_s)
            start = stop

    def _visit_keepings(self, rows: _Rows, row: Ints, frame: Ints, best_s: Floats) -> None:
        """Bound every keeping of some frames, drop what cannot fit, unfold the rest."""
        table = rows.table
        keepings_F = [np.flatnonzero(table.frame_of_G == f) for f in range(len(table.frame_FA))]
        repeats = np.array([len(keepings_F[f]) for f in frame], dtype=np.int64)
        if not repeats.sum():
            return
        row = np.repeat(row, repeats)
        keeping = np.concatenate([keepings_F[f] for f in frame])
        candidates = _with_ways(table, _taken(rows.rows, row), table.keeping_GA[keeping])
        bound_s = least_s(self._question, self._ways, candidates)
        kept = np.flatnonzero(bound_s <= np.minimum(self._wanted_s(), best_s[row]))
        if not len(kept):
            return
        kept = kept[self._can_fit(candidates.taken(kept))]
        kept = kept[np.argsort(bound_s[kept], kind="stable")]
        start, most = 0, FIRST_KEEPINGS
        while start < len(kept):
            now = kept[start : start + most]
            start, most = start + most, min(2 * most, MOST_KEEPINGS)
            now = now[bound_s[now] <= np.minimum(self._wanted_s(), best_s[row[now]])]
            if len(now):
                self._visit_ways(rows, row[now], keeping[now], best_s)

    def _can_fit(self, candidates: Candidates) -> Mask:
        """Keepings of which something may fit: with every layer computed again."""
        again = self._ways.choices["recompute"]
        leanest = np.full(len(candidates), len(again) - 1)
        lean = Candidates(rows=candidates.rows, ways={**candidates.ways, "recompute": leanest})
        return fits_somehow(self._question, self._ways, lean, is_idle=True)

    def _visit_ways(self, rows: _Rows, row: Ints, keeping: Ints, best_s: Floats) -> None:
        """Bound every way of some keepings, price what is left in time and memory."""
        table = rows.table
        repeats = table.count_of_G[keeping]
        index = np.repeat(np.arange(len(keeping)), repeats)
        within = np.arange(len(index)) - np.repeat(np.cumsum(repeats) - repeats, repeats)
        way = table.start_of_G[keeping][index] + within
        row = row[index]
        candidates = _with_ways(table, _taken(rows.rows, row), table.ways_TA[way])
        bound_s = least_s(self._question, self._ways, candidates)
        kept = np.flatnonzero(bound_s <= np.minimum(self._wanted_s(), best_s[row]))
        kept = kept[fits_somehow(self._question, self._ways, candidates.taken(kept))]
        kept = kept[np.argsort(bound_s[kept], kind="stable")]
        is_first = rank_within(row[kept]) < WAYS_FIRST
        for part in (kept[is_first], kept[~is_first]):
            now = part[bound_s[part] <= np.minimum(self._wanted_s(), best_s[row[part]])]
            if len(now):
                self._price_ways(candidates.taken(now), row[now], bound_s[now], best_s)

    def _price_ways(
        self, candidates: Candidates, row: Ints, bound_s: Floats, best_s: Floats
    ) -> None:
        """Price ways, where needed in a lean layout, and keep the best of every row."""
        found, full = price_to_fit(self._question, self._ways, candidates)
        self._priced += len(candidates)
        if len(full):
            bound_s[full] = capped_least_s(self._question, self._ways, candidates.taken(full))
        self._keep(candidates, row, found, best_s)
        # Another layout of what was priced may be faster than its own.
        self._bound_s = min(self._bound_s, float(bound_s.min()))

    def _best_s(self) -> float:
        return np.inf if self._found is None else float(self._found.step_s[0])

    def _keep(
        self,
        candidates: Candidates,
        row: Ints,
        prices: Prices,
        best_s: Floats,
    ) -> None:
        """Keep the best way of every row that fits in one."""
        fitting = np.flatnonzero(prices.peak_bytes <= self._question.memory_limit_bytes)
        if not len(fitting):
            return
        order = fitting[np.argsort(prices.step_s[fitting], kind="stable")]
        _, first = np.unique(row[order], return_index=True)
        better = order[first]
        better = better[prices.step_s[better] < best_s[row[better]]]
        best_s[row[better]] = prices.step_s[better]
        new = Found(
            candidates=candidates.taken(better),
            step_s=prices.step_s[better],
            peak_bytes=prices.peak_bytes[better],
            layers_PC=prices.layers_PC[:, better],
        )
        self._found = new if self._found is None else self._found.joined(new)

    def _wanted_s(self) -> float:
        """Slower is of no interest: neither among the K best rows nor a tie of the best."""
        top = self._settings.top
        if self._found is None or len(self._found) < top:
            return self._settings.below_s
        steps_s = self._found.step_s
        tie_s = float(steps_s[0]) * (1.0 + self._settings.band_ratio)
        return min(max(float(steps_s[top - 1]), tie_s), self._settings.below_s)

    def _is_late(self) -> bool:
        elapsed_s = self._settings.clock() - self._start_s
        return elapsed_s > self._settings.time_limit_s

    def _leave_cells(self, cells: Ints, least_s: float) -> None:
        """Time is over: nothing is known of these but their bound."""
        self._bound_s = min(self._bound_s, least_s)
        for facts, chosen in by_facts(rows := self._degrees.rows(cells)):
            self._open += len(chosen) * self._table(facts).num_legal
        del rows

    def _leave_frames(self, rows: _Rows, row: Ints, frame: Ints) -> None:
        self._bound_s = min(self._bound_s, float(rows.bound_CF[row, frame].min()))
        table = rows.table
        ways_F = np.bincount(
            table.frame_of_G, weights=table.count_of_G, minlength=len(table.frame_FA)
        )
        self._open += int(ways_F[frame].sum())

    def _table(self, facts: Facts) -> WayTable:
        if facts not in self._tables:
            self._tables[facts] = way_table(self._ways, facts)
        return self._tables[facts]

    def _summary(self) -> Search:
        found = self._found
        counts = Counts(
            priced=self._priced,
            bounded=self._legal - self._priced - self._open,
            illegal=self._illegal,
            open=self._open,
            rows=self._degrees.num_legal,
        )
        return Search(
            question=self._question,
            ways=self._ways,
            degrees=self._degrees,
            found=found,
            bound_s=min(self._bound_s, self._best_s()),
            complete_s=0.0 if self._open else self._wanted_s(),
            counts=counts,
            solve_s=self._settings.clock() - self._start_s,
        )


def _leanest(ways: Ways, table: WayTable) -> Ints:
    """A way that holds no more than any of the table's, legal or not."""
    way = np.zeros(len(table.axes), dtype=np.int64)
    for axis in LEAN_AXES:
        at = table.axes.index(axis)
        way[at] = table.ways_TA[:, at].max(initial=0)
    way[table.axes.index("recompute")] = len(ways.choices["recompute"]) - 1
    return way


def _with_way(table: WayTable, rows: Table, way: Ints) -> Candidates:
    columns = len(rows["tensor"])
    return Candidates(
        rows=rows,
        ways={axis: np.full(columns, way[i], dtype=np.int64) for i, axis in enumerate(table.axes)},
    )


def _with_ways(table: WayTable, rows: Table, ways_CA: Ints) -> Candidates:
    return Candidates(rows=rows, ways=table.columns(ways_CA))


def _taken(rows: Table, chosen: Ints) -> Table:
    return {name: column[chosen] for name, column in rows.items()}
