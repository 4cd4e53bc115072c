"""Choose the next sizes to measure in a table: those that reduce its interpolation error most.

The line (profilers/sampled_sizes.py) with the largest leave-one-out error over the root of its
number of points comes first. Of `CANDIDATES` sizes drawn on it, the one is taken that lies far, in
octaves, from all measured points and near badly predicted ones: the largest error times the root of
the distance. Under the covariance of profilers/interpolation.py the standard deviation grows with
that root; to weigh it by leave-one-out errors: Le Gratiet and Cannamela, Technometrics 57, 2015. So
points gather where operands leave a cache or a collective changes its protocol. The score is
divided by the root of the cost of a case: otherwise half of the time would go to the largest
tenth of the sizes. The round sizes of a grid predict each other, but not rows that leave a vector
partly empty, so a series counts as unknown until it has `MIN_SAMPLED` other sizes.

Every `HOLDOUT_EVERY`-th size is drawn uniformly at random instead and left out of all fits until
the end: the hold-out sizes that measure the error in between (profilers/held_out.py).

Letters: N points of a line, A axes.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from profilers.interpolation import KernelCurve, fit_rows
from profilers.records import AXES, Case, Measurement
from profilers.sampled_sizes import SIZES, Line, drawn, lines, listed
from profilers.series import BY_GROUP, together_s

Floats = NDArray[np.float64]

CANDIDATES = 32
HOLDOUT_EVERY = 6
BATCH = 12
"""New cases chosen from one fit, at least, as fitting takes as long as measuring a few..."""
BATCH_RATIO = 0.25
"""...and later as many more as make this share of those known, as fits grow with them."""
MAX_LINE_POINTS = 350
"""Points of a line: the fit of more costs more than they add."""
MIN_SAMPLED = 6
"""A series with fewer sizes between those of its grid counts as unknown: a grid of round sizes
predicts itself well, and says nothing of rows that leave a vector partly empty."""
UNKNOWN_RATIO = 0.2
"""The assumed error of a line with too few points to leave one out."""


@dataclass(slots=True, kw_only=True)
class Infill:
    """Chooses sizes to add to one table, from its rows so far."""

    rows: list[Measurement]
    """All rows so far; grows as the table is measured."""
    rng: np.random.Generator
    error_ratio: float = UNKNOWN_RATIO
    """Mean leave-one-out error at the last fit."""
    holdout: set[str] = field(default_factory=set)
    """Ids of the hold-out cases, which are left out of fits."""
    cost_s: Callable[[Case], float] = field(default=lambda _case: 1.0)
    """Seconds that a case takes."""
    _sampled: set[str] = field(init=False, default_factory=set)
    """Ids of sizes between those of the grid that are in the fits."""
    _proposed: int = field(init=False, default=0)
    _queue: list[Case] = field(init=False, default_factory=list)

    def next(self) -> Case | None:
        """Choose the next size to measure; None if there is nothing between the sizes."""
        if not self._queue:
            self._queue = self._choose_batch()
        return self._queue.pop(0) if self._queue else None

    def _choose_batch(self) -> list[Case]:
        fitted = [row for row in self.rows if listed(row.case).id not in self.holdout]
        known = {line: cases for line, cases in lines(fitted).items() if _is_open(cases)}
        if not known:
            return []
        errors = _errors(_left_out(fitted), known)
        mean_ratio = self._mean_ratio(known, errors)
        self.error_ratio = float(np.mean(list(mean_ratio.values())))
        taken = {line: list(cases) for line, cases in known.items()}
        # A size that the fits have seen would not test them.
        seen = {listed(row.case).id for row in self.rows}
        names = sorted(known)
        count = BATCH
        if self._proposed:
            count = max(BATCH, round(BATCH_RATIO * sum(map(len, known.values()))))
        chosen: list[Case] = []
        for _ in range(count):
            self._proposed += 1
            if self._proposed % HOLDOUT_EVERY == 0:
                case = drawn(known[names[int(self.rng.integers(len(names)))]], rng=self.rng)
                if case.id in seen:
                    continue
                self.holdout.add(case.id)
            else:
                line = max(names, key=lambda one: mean_ratio[one] / math.sqrt(len(taken[one])))
                case = _farthest(
                    known[line],
                    taken=taken[line],
                    errors_N=errors[line],
                    cost_s=self.cost_s,
                    rng=self.rng,
                )
                taken[line].append(case)
                if case.id in seen:
                    continue
                self._sampled.add(case.id)
            seen.add(case.id)
            chosen.append(case)
        return chosen

    def _mean_ratio(
        self, known: Mapping[Line, Sequence[Case]], errors: Mapping[Line, Floats]
    ) -> Mapping[Line, float]:
        """Mean error of every line; at least `UNKNOWN_RATIO` while its series is one of a grid."""
        sampled_of_series = Counter(
            (kind, dtype)
            for (kind, dtype, _), cases in known.items()
            for case in cases
            if case.id in self._sampled
        )
        return {
            (kind, dtype, fixed): max(
                float(np.mean(errors_N)),
                UNKNOWN_RATIO if sampled_of_series[kind, dtype] < MIN_SAMPLED else 0.0,
            )
            for (kind, dtype, fixed), errors_N in errors.items()
        }


def _farthest(
    line: Sequence[Case],
    *,
    taken: Sequence[Case],
    errors_N: Floats,
    cost_s: Callable[[Case], float],
    rng: np.random.Generator,
) -> Case:
    """Choose the best of the candidates; `taken` begins with the points of the line."""
    taken_NA = _octaves(taken)
    mean_error = float(errors_N.mean())
    best_score, best = -1.0, line[0]
    for _ in range(CANDIDATES):
        case = drawn(line, rng=rng)
        distance_N = np.linalg.norm(taken_NA - _octaves([case]), axis=1)
        nearest = int(np.argmin(distance_N))
        local = float(errors_N[nearest]) if nearest < len(errors_N) else mean_error
        score = (mean_error + local) * math.sqrt(float(distance_N[nearest]) / cost_s(case))
        if score > best_score:
            best_score, best = score, case
    return best


def _errors(
    left_out: Mapping[str, Sequence[float]], known: Mapping[Line, Sequence[Case]]
) -> Mapping[Line, Floats]:
    """|ln| of measured over predicted for the cases of every line, the directions' mean."""
    errors = {}
    for line, cases in known.items():
        means_N = np.array([np.abs(left_out.get(_name_of(c), (np.nan,))).mean() for c in cases])
        is_known = ~np.isnan(means_N)
        mean_error = means_N[is_known].mean() if is_known.any() else UNKNOWN_RATIO
        errors[line] = np.where(is_known, means_N, mean_error)
    return errors


def _left_out(rows: Sequence[Measurement]) -> Mapping[str, Sequence[float]]:
    """Logarithm of measured over predicted from the others, by a case's name; each direction's."""
    if rows[0].case.operation in BY_GROUP:
        return _left_out_of_groups(rows)
    errors: dict[str, list[float]] = {}
    for series, curve in fit_rows(rows).items():
        if isinstance(curve, KernelCurve):
            sizes_NA = np.exp2(curve.octaves_NA).round().astype(np.int64)
            for place, error in zip(sizes_NA.tolist(), curve.left_out_N.tolist(), strict=True):
                errors.setdefault(_name(series.kind, series.dtype, place), []).append(error)
    return errors


def _left_out_of_groups(rows: Sequence[Measurement]) -> dict[str, list[float]]:
    """Inner points of each line, predicted from their two neighbours, linearly in log space."""
    errors: dict[str, list[float]] = {}
    for series, timed in together_s(rows).items():
        points = sorted((place[1:], max(place[0], 1), s) for place, s in timed.items() if s > 0.0)
        for _, on_line in groupby(points, key=lambda point: point[0]):
            sizes = list(on_line)
            for left, middle, right in zip(sizes, sizes[1:], sizes[2:], strict=False):
                low, size, high = (math.log(point[1]) for point in (left, middle, right))
                share = (size - low) / (high - low)
                predicted = (1.0 - share) * math.log(left[2]) + share * math.log(right[2])
                name = _name(series.kind, series.dtype, [middle[1], *middle[0]])
                errors.setdefault(name, []).append(math.log(middle[2]) - predicted)
    return errors


def _is_open(line: Sequence[Case]) -> bool:
    """Whether there are sizes in between, and not too many known ones."""
    return len(line) < MAX_LINE_POINTS and any(
        len({case.axes[name] for case in line}) > 1 for name in SIZES[line[0].operation]
    )


def _octaves(cases: Sequence[Case]) -> Floats:
    names = SIZES[cases[0].operation]
    sizes_NA = np.array([[max(case.axes[name], 1) for name in names] for case in cases])
    octaves: Floats = np.log2(sizes_NA)
    return octaves


def _place(case: Case) -> list[int]:
    return [max(case.axes[axis], 1) for axis in AXES[case.operation]]


def _name_of(case: Case) -> str:
    return _name(case.kind, case.dtype, _place(case))


def _name(kind: str, dtype: str, place: Sequence[int]) -> str:
    return f"{kind}/{dtype}/{'-'.join(map(str, place))}"
