"""Branch and bound over all degrees and ways: bounds first, prices for what they leave.

    cells    degrees without the experts', by the bound of an imagined expert      bounds.py rows
    with every expert degree: a bound per frame, and whether any fits     min_memory.py keepings
    with all but what is computed again: a bound                          candidate_prices.py agains
    with what is computed again and nothing else: a bound, whether any fits ways     a bound; if
    need be priced in full, in a layout of their own          candidate_prices.py

Cells are opened in the order of their bounds, then their rows visited in the order of theirs. A
frame that fits with nothing computed again is unfolded into keepings, one that does not into agains
(option_table.py). What is bounded by more than is still wanted (the K-th best layout, each row at
its best) is left where it stands; so is what fits in no layout. Bounds only ever grow from level to
level, so that

    space = priced + bounded + illegal + open

counts every decision once; `open` is what time ran out on. Work arrives in batches of bounded size,
and the threshold falls after every one.

Letters: C candidates, F frames, A axes. Not covered: settings that differ between stages, which the
integer program of the finalists decides.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tuner.planner.analytic.added import Kinds, Known
from tuner.planner.analytic.batches import FIRST_ROWS, MOST_ROWS, batches, rank_within, unfolded
from tuner.planner.analytic.bounds import Allowed, least_step_s
from tuner.planner.analytic.candidate_prices import Prices, batch_of, least_s
from tuner.planner.analytic.candidates import Candidates
from tuner.planner.analytic.degrees import Table, legal_degrees
from tuner.planner.analytic.incumbents import Counts, Found, Search
from tuner.planner.analytic.memory_feasibility import fits_somehow
from tuner.planner.analytic.min_memory import again_fits, frame_fits_plainly, keeping_fits, row_fits
from tuner.planner.analytic.min_memory_layout import capped_least_s, price_to_fit
from tuner.planner.analytic.option_table import WayTable
from tuner.planner.analytic.options import ways_of
from tuner.planner.analytic.problem import Question
from tuner.planner.analytic.progress import counted, ended, opened, passing
from tuner.planner.analytic.root_bound import allowed_by, cell_bounds_s
from tuner.planner.analytic.rows import Rows, groups_of_frames, joined, taken_rows, with_ways
from tuner.planner.analytic.rules import Ints
from tuner.planner.analytic.space_size import space
from tuner.planner.layout_groups import rows_of_layouts
from tuner.planner.progress import Told, Watch, unwatched

Floats = npt.NDArray[np.float64]

SEEDS = 8
"""Cells of every pipeline size that are visited before all others."""

FIRST_FRAMES = 128
"""Frames of rows whose keepings are bounded before the first look at the threshold; every further
look may be twice as far away, up to `MOST_FRAMES`."""
MOST_FRAMES = 2048

FIRST_GROUPS = 256
"""Keepings or agains whose ways are bounded before the first look at the threshold, and so on."""
MOST_GROUPS = 2048

WAYS_FIRST = 4
"""Of each row the most promising, priced before all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to search."""

    top: int = 8
    """Layouts to find at least, when there are as many (layout_groups.py)."""
    band_ratio: float = 0.0
    """Rows that are slower than the best by no more than this share are found and counted."""
    below_s: float = np.inf
    """Only faster steps than this are of interest."""
    known: Known | None = None
    """What was searched before, at the same prices; its decisions are left out, and what is not
    priced is not counted."""
    time_limit_s: float = 60.0
    processes: int = 1
    """That may answer questions about what was found side by side; one search is one process."""
    clock: Callable[[], float]
    watch: Watch = unwatched

    def since(self, begun_s: float) -> "Settings":
        """Return the same with what is left of the time limit, were it to begin at a moment."""
        left_s = self.time_limit_s - (self.clock() - begun_s)
        return replace(self, time_limit_s=max(0.0, left_s))


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
        is_whole = settings.known is None
        self._legal, self._illegal = space(self._ways, self._degrees) if is_whole else (0, {})
        self._kinds = Kinds(ways=self._ways, known=settings.known)
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
        order = order[bound_N[order] <= self._wanted_s()]
        if not np.isfinite(self._settings.below_s):
            seeds = self._seeds(order)
            self._visit(self._opened(seeds))
            order = order[~np.isin(order, seeds)]
        pending: list[Rows] = []
        for batch in batches(order, self._degrees.num_pairs_N, first=self._first_rows()):
            least_s = float(bound_N[batch[0]])
            if least_s > self._wanted_s():
                break
            watch(self._passing(least_s, int((bound_N < least_s).sum()), len(bound_N), "cells"))
            if self._is_late():
                self._leave_cells(batch, least_s)
                continue
            pending += self._opened(batch[bound_N[batch] <= self._wanted_s()])
        self._visit(pending)
        found = self._summary()
        watch(ended(found))
        return found

    def _first_rows(self) -> int:
        """Small batches are for a threshold that has yet to fall."""
        return MOST_ROWS if np.isfinite(self._settings.below_s) else FIRST_ROWS

    def _passing(self, least_s: float, done: int, total: int, what: str) -> Told:
        bound_s = min(least_s, self._bound_s)
        return passing(
            f"{done} of {total} {what}", best_s=self._best_s(), bound_s=bound_s, priced=self._priced
        )

    def _seeds(self, order: Ints) -> Ints:
        """The most promising cells of every pipeline size, so that the threshold falls early."""
        pipeline = self._degrees.dense_D["pipeline"][self._degrees.cells_N["dense"][order]]
        return order[rank_within(pipeline) < SEEDS]

    def _opened(self, cells: Ints) -> list[Rows]:
        """Bound the rows of some cells in their leading frames; what cannot fit is left out."""
        rows = self._degrees.rows(cells)
        return [
            alike
            for table, chosen in self._kinds.sorted(rows)
            for alike in self._opened_alike(table, taken_rows(rows, chosen))
        ]

    def _opened_alike(self, table: WayTable, rows: Table) -> Iterator[Rows]:
        has_threshold = bool(np.isfinite(self._wanted_s()))
        if not has_threshold:
            # Nothing is too slow yet, so what cannot fit goes first.
            rows = taken_rows(rows, self._fitting(table, rows))
        if not len(rows["tensor"]):
            return
        allowed = allowed_by(self._ways, table)
        bound_CF = self._frame_bounds_s(table, table.leading_F, rows, allowed)
        kept = np.flatnonzero(bound_CF.min(axis=1) <= self._wanted_s())
        if has_threshold:
            kept = kept[self._fitting(table, taken_rows(rows, kept))]
        if len(kept):
            rows = taken_rows(rows, kept)
            yield Rows(table=table, rows=rows, bound_CF=bound_CF[kept], allowed=allowed)

    def _fitting(self, table: WayTable, rows: Table) -> Ints:
        return np.flatnonzero(row_fits(self._question, self._ways, table, rows))

    def _visit(self, opened: list[Rows]) -> None:
        """Go through rows in the order of their bounds, a batch at a time."""
        parts = joined(opened)
        least_C = np.concatenate([np.zeros(0), *(part.least_C for part in parts)])
        part_C = np.repeat(np.arange(len(parts)), [len(part.least_C) for part in parts])
        place_C = np.concatenate(
            [np.zeros(0, np.int64), *(np.arange(len(p.least_C)) for p in parts)]
        )
        order = np.argsort(least_C, kind="stable")
        for batch in batches(order, np.ones_like(order), first=self._first_rows()):
            least_s = float(least_C[batch[0]])
            if least_s > self._wanted_s():
                return
            done = int((least_C < least_s).sum())
            self._settings.watch(self._passing(least_s, done, len(order), "rows"))
            here = batch[least_C[batch] <= self._wanted_s()]
            for index in np.unique(part_C[here]):
                self._visit_rows(parts[index].taken(place_C[here[part_C[here] == index]]))

    def _visit_rows(self, rows: Rows) -> None:
        table = rows.table
        if self._is_late():
            self._bound_s = min(self._bound_s, float(rows.least_C.min()))
            self._open += len(rows.least_C) * table.num_legal
            return
        others = tuple(f for f in range(len(table.frame_FA)) if f not in table.leading_F)
        bound_CF = np.empty((len(rows.least_C), len(table.frame_FA)))
        bound_CF[:, table.leading_F] = rows.bound_CF
        bound_CF[:, others] = self._frame_bounds_s(table, others, rows.rows, rows.allowed)
        self._visit_frames(replace(rows, bound_CF=bound_CF))

    def _frame_bounds_s(
        self, table: WayTable, frames: Sequence[int], rows: Table, allowed: Allowed
    ) -> Floats:
        """Bound every row in every one of some frames, [C, F], as columns of one batch."""
        count = len(rows["tensor"])
        if not frames:
            return np.empty((count, 0))
        every = {name: np.repeat(column, len(frames)) for name, column in rows.items()}
        ways_CA = np.tile(table.frame_FA[list(frames)], (count, 1))
        return self._bounds(with_ways(table, every, ways_CA), allowed).reshape(count, len(frames))

    def _bounds(self, candidates: Candidates, allowed: Allowed) -> Floats:
        batch = batch_of(self._question, self._ways, candidates)
        units = batch.times.taken(batch.time_of_C)
        return least_step_s(self._question, batch.strategies, units, allowed)

    def _visit_frames(self, rows: Rows) -> None:
        """Go through the frames of rows in the order of their bounds, a few at a time."""
        table, best_s = rows.table, np.full(len(rows.bound_CF), np.inf)
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
            here, of = here[wanted], of[wanted]
            some = taken_rows(rows.rows, here)
            is_roomy = frame_fits_plainly(self._question, self._ways, table, some, of)
            self._visit_keepings(rows, here[is_roomy], of[is_roomy], best_s)
            self._visit_agains(rows, here[~is_roomy], of[~is_roomy], best_s)
            start = stop

    def _visit_keepings(self, rows: Rows, row: Ints, frame: Ints, best_s: Floats) -> None:
        """Bound every keeping of some frames, unfold the rest."""
        table = rows.table
        row, keeping = groups_of_frames(row, frame, table.frame_of_G, frames=len(table.frame_FA))
        if not len(row):
            return
        every = with_ways(table, taken_rows(rows.rows, row), table.keeping_GA[keeping])
        bound_s = least_s(self._question, self._ways, every)
        kept = np.flatnonzero(bound_s <= np.minimum(self._wanted_s(), best_s[row]))
        kept = kept[keeping_fits(self._question, self._ways, every.taken(kept))]
        for now in self._in_order(kept, bound_s, row, best_s):
            of, place = unfolded(table.count_of_G[keeping[now]], table.start_of_G[keeping[now]])
            self._visit_ways(rows, row[now][of], place, best_s)

    def _visit_agains(self, rows: Rows, row: Ints, frame: Ints, best_s: Floats) -> None:
        """Bound every again of some frames, drop what cannot fit, unfold the rest."""
        table = rows.table
        row, again = groups_of_frames(row, frame, table.frame_of_H, frames=len(table.frame_FA))
        if not len(row):
            return
        every = with_ways(table, taken_rows(rows.rows, row), table.again_HA[again])
        bound_s = self._bounds(every, rows.allowed)
        kept = np.flatnonzero(bound_s <= np.minimum(self._wanted_s(), best_s[row]))
        some = taken_rows(rows.rows, row[kept])
        kept = kept[again_fits(self._question, self._ways, table, some, again[kept])]
        for now in self._in_order(kept, bound_s, row, best_s):
            of, place = unfolded(table.count_of_H[again[now]], table.start_of_H[again[now]])
            self._visit_ways(rows, row[now][of], table.by_again_T[place], best_s)

    def _in_order(self, kept: Ints, bound_s: Floats, row: Ints, best_s: Floats) -> Iterator[Ints]:
        """Those of the lowest bounds first, a few at a time, as long as they are wanted."""
        kept = kept[np.argsort(bound_s[kept], kind="stable")]
        start, most = 0, FIRST_GROUPS
        while start < len(kept):
            now = kept[start : start + most]
            start, most = start + most, min(2 * most, MOST_GROUPS)
            now = now[bound_s[now] <= np.minimum(self._wanted_s(), best_s[row[now]])]
            if len(now):
                yield now

    def _visit_ways(self, rows: Rows, row: Ints, way: Ints, best_s: Floats) -> None:
        """Bound ways, price what is left in time and memory."""
        table = rows.table
        candidates = with_ways(table, taken_rows(rows.rows, row), table.ways_TA[way])
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
        """Slower is of no interest: not the best of the K best layouts, and no tie of the best."""
        if self._found is None:
            return self._settings.below_s
        rows = rows_of_layouts(self._found.layouts(), top=self._settings.top)
        if rows is None:
            return self._settings.below_s
        steps_s = self._found.step_s
        tie_s = float(steps_s[0]) * (1.0 + self._settings.band_ratio)
        return min(max(float(steps_s[rows - 1]), tie_s), self._settings.below_s)

    def _is_late(self) -> bool:
        elapsed_s = self._settings.clock() - self._start_s
        return elapsed_s > self._settings.time_limit_s

    def _leave_cells(self, cells: Ints, least_s: float) -> None:
        """Time is over: nothing is known of these but their bound."""
        self._bound_s = min(self._bound_s, least_s)
        for table, chosen in self._kinds.sorted(self._degrees.rows(cells)):
            self._open += len(chosen) * table.num_legal

    def _leave_frames(self, rows: Rows, row: Ints, frame: Ints) -> None:
        self._bound_s = min(self._bound_s, float(rows.bound_CF[row, frame].min()))
        table = rows.table
        ways_F = np.bincount(
            table.frame_of_G, weights=table.count_of_G, minlength=len(table.frame_FA)
        )
        self._open += int(ways_F[frame].sum())

    def _summary(self) -> Search:
        found = self._found
        counts = Counts(
            priced=self._priced,
            bounded=max(0, self._legal - self._priced - self._open),
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
