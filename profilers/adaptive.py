"""Where one more measured point helps most.

A line (profilers/sampled_sizes.py) whose points are badly predicted by its other points, and which
has few of them, comes first: by error over the root of their number. On it, of `CANDIDATES` sizes
drawn at random, the one is taken that lies far, in octaves, from all measured points and near badly
predicted ones: by error times the root of the distance. Under the covariance of
profilers/interpolation.py the standard deviation of what is not known grows with that root; to
weigh it by the errors of points left out: Le Gratiet and Cannamela, Technometrics 57, 2015. So
points gather where operands leave a cache or a collective changes its protocol, and a stretch that
is known well keeps its few. The score is divided by the root of what the visit costs: half of the
time would go to the largest tenth of the sizes. A grid's round sizes foretell each other, and not
rows that fill no vector, so a series counts as unknown until it has `LEAST_DRAWN` other sizes.

Every `CHECK_EVERY`-th size is drawn blindly instead and left out of all fits until the end, when it
tells how well sizes in between are known (profilers/held_out.py).

New sizes take turns with visits to measured ones that look disturbed (profilers/revisits.py). Blind
sizes are all visited twice, whatever they took, so that what they tell is not chosen.

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
from profilers.revisits import Revisits
from profilers.sampled_sizes import SIZES, Line, drawn, lines, listed
from profilers.series import BY_GROUP, together_s

Floats = NDArray[np.float64]

CANDIDATES = 32
CHECK_EVERY = 6
BATCH = 12
"""New cases chosen from one fit, at least, as fitting takes as long as measuring a few..."""
BATCH_RATIO = 0.25
"""...and later as many more as make this share of those known, as fits grow with them."""
MAX_LINE_POINTS = 350
"""Points of a line: more cost more to fit than they tell."""
LEAST_DRAWN = 6
"""Sizes between those of the grid without which a series counts as unknown: a grid of round sizes
foretells itself well, and tells nothing of rows that fill no vector."""
UNKNOWN_RATIO = 0.2
"""Stands for the error of a line with too few points to leave one out."""


@dataclass(slots=True, kw_only=True)
class Infill:
    """Sizes to add to one table; it learns from the rows of the table as they come."""

    rows: list[Measurement]
    """Everything measured so far; grows as the table is measured."""
    rng: np.random.Generator
    error_ratio: float = UNKNOWN_RATIO
    """Mean error of points predicted from the others of their line, when last looked at."""
    checks: set[str] = field(default_factory=set)
    """Ids of the cases that were drawn blindly and are left out of fits."""
    cost_s: Callable[[Case], float] = field(default=lambda _case: 1.0)
    """What a visit to a case takes."""
    is_shared: bool = False
    """Ranks run in turns: a visit is slow by what its peers did, which belongs to it."""
    gains: Mapping[str, float] = field(default_factory=dict)
    """What visits to measured sizes brought (profilers/visits.py); grows likewise."""
    _revisits: Revisits = field(init=False)
    _unsure: list[Case] = field(init=False, default_factory=list)
    """Blind sizes that were visited once."""
    _drawn: set[str] = field(init=False, default_factory=set)
    """Ids of sizes between those of the grid, those left out of fits aside."""
    _proposed: int = field(init=False, default=0)
    _queue: list[Case] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self._revisits = Revisits(gains=self.gains)

    def disturbed(self) -> str:
        """Say that something disturbs the machine, where visits again were much faster."""
        return self._revisits.told()

    def next(self) -> Case | None:
        """Choose the next size to measure; None where there is nothing between the sizes."""
        if not self._queue:
            self._queue = self._chosen()
        return self._queue.pop(0) if self._queue else None

    def _chosen(self) -> list[Case]:
        fitted = [row for row in self.rows if listed(row.case).id not in self.checks]
        known = {line: cases for line, cases in lines(fitted).items() if _is_open(cases)}
        if not known:
            return []
        left_out = _left_out(fitted)
        errors = _errors(left_out, known)
        mean_ratio = self._mean_ratio(known, errors)
        self.error_ratio = float(np.mean(list(mean_ratio.values())))
        taken = {line: list(cases) for line, cases in known.items()}
        # Drawn again, a size that the fits have seen would be no check of them.
        seen = {listed(row.case).id for row in self.rows}
        names = sorted(known)
        count = BATCH
        if self._proposed:
            count = max(BATCH, round(BATCH_RATIO * sum(map(len, known.values()))))
        again = self._again(known, left_out, errors, num_new=count)
        chosen: list[Case] = []
        for _ in range(count):
            self._proposed += 1
            if self._proposed % CHECK_EVERY == 0:
                case = drawn(known[names[int(self.rng.integers(len(names)))]], rng=self.rng)
                if case.id in seen:
                    continue
                self.checks.add(case.id)
                self._unsure.append(case)
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
                self._drawn.add(case.id)
            seen.add(case.id)
            chosen.append(case)
        return _mixed(chosen, again)

    def _mean_ratio(
        self, known: Mapping[Line, Sequence[Case]], errors: Mapping[Line, Floats]
    ) -> Mapping[Line, float]:
        """Mean error of every line; at least `UNKNOWN_RATIO` while its series is one of a grid."""
        drawn_of_series = Counter(
            (kind, dtype)
            for (kind, dtype, _), cases in known.items()
            for case in cases
            if case.id in self._drawn
        )
        return {
            (kind, dtype, fixed): max(
                float(np.mean(errors_N)),
                UNKNOWN_RATIO if drawn_of_series[kind, dtype] < LEAST_DRAWN else 0.0,
            )
            for (kind, dtype, fixed), errors_N in errors.items()
        }

    def _again(
        self,
        known: Mapping[Line, Sequence[Case]],
        left_out: Mapping[str, Sequence[float]],
        errors: Mapping[Line, Floats],
        *,
        num_new: int,
    ) -> list[Case]:
        if self.is_shared:
            return []
        always, self._unsure = self._unsure, []
        return self._revisits.chosen(
            [
                (case, max(left_out.get(_name_of(case), (0.0,))))
                for cases in known.values()
                for case in cases
            ],
            always=always,
            cost_s=self.cost_s,
            num_new=num_new,
            error_ratio=float(np.mean([errors_N.mean() for errors_N in errors.values()])),
        )


def _mixed(one: Sequence[Case], other: Sequence[Case]) -> list[Case]:
    """Both in their order, evenly spread among each other: time may be up in between."""
    places = [
        ((n + 0.5) / len(cases), case) for cases in (one, other) for n, case in enumerate(cases)
    ]
    return [case for _, case in sorted(places, key=lambda place: place[0])]


def _farthest(
    line: Sequence[Case],
    *,
    taken: Sequence[Case],
    errors_N: Floats,
    cost_s: Callable[[Case], float],
    rng: np.random.Generator,
) -> Case:
    """Take the best of the candidates; `taken` begins with the points of the line."""
    taken_NA = _octaves(taken)
    usual = float(errors_N.mean())
    best_score, best = -1.0, line[0]
    for _ in range(CANDIDATES):
        case = drawn(line, rng=rng)
        apart_N = np.linalg.norm(taken_NA - _octaves([case]), axis=1)
        nearest = int(np.argmin(apart_N))
        local = float(errors_N[nearest]) if nearest < len(errors_N) else usual
        score = (usual + local) * math.sqrt(float(apart_N[nearest]) / cost_s(case))
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
        is_told = ~np.isnan(means_N)
        usual = means_N[is_told].mean() if is_told.any() else UNKNOWN_RATIO
        errors[line] = np.where(is_told, means_N, usual)
    return errors


def _left_out(rows: Sequence[Measurement]) -> Mapping[str, Sequence[float]]:
    """Logarithm of measured over predicted from the others, by a case's name; each direction's."""
    if rows[0].case.operation in BY_GROUP:
        return _left_out_of_groups(rows)
    found: dict[str, list[float]] = {}
    for series, curve in fit_rows(rows).items():
        if isinstance(curve, KernelCurve):
            sizes_NA = np.exp2(curve.octaves_NA).round().astype(np.int64)
            for place, error in zip(sizes_NA.tolist(), curve.left_out_N.tolist(), strict=True):
                found.setdefault(_name(series.kind, series.dtype, place), []).append(error)
    return found


def _left_out_of_groups(rows: Sequence[Measurement]) -> dict[str, list[float]]:
    """Inner points of each line, predicted from their two neighbours, linearly in log space."""
    found: dict[str, list[float]] = {}
    for series, timed in together_s(rows).items():
        points = sorted((place[1:], max(place[0], 1), s) for place, s in timed.items() if s > 0.0)
        for _, on_line in groupby(points, key=lambda point: point[0]):
            sizes = list(on_line)
            for left, middle, right in zip(sizes, sizes[1:], sizes[2:], strict=False):
                low, size, high = (math.log(point[1]) for point in (left, middle, right))
                share = (size - low) / (high - low)
                wanted = (1.0 - share) * math.log(left[2]) + share * math.log(right[2])
                name = _name(series.kind, series.dtype, [middle[1], *middle[0]])
                found.setdefault(name, []).append(math.log(middle[2]) - wanted)
    return found


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
