"""Where one more measured point helps most.

Points that differ in one axis only form a line. On a line, leaving an inner point out and
predicting it from its two neighbours, linearly in log space, shows how wrong interpolation is
there. The next point goes to the middle (in log space) of the wider of the two gaps beside the
point that is predicted worst. Points gather where the curve bends, e.g. where operands leave a
cache or a collective changes its protocol, and a straight stretch keeps its few points.

A gap narrower than `MIN_GAP_RATIO` is never split: there, repeats differ as much as sizes do.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from profilers.records import AXES, Case, Measurement, Status

TARGET_ERROR = 0.05
MIN_GAP_RATIO = 1.4


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Time at one size of a line."""

    size: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A size to measure next, and the relative error that makes it worth it."""

    size: int
    error: float


def propose(
    points: Sequence[Point],
    *,
    target_error: float = TARGET_ERROR,
    min_gap_ratio: float = MIN_GAP_RATIO,
) -> Proposal | None:
    """Propose the next size on a line; nothing when every inner point is predicted well."""
    line = sorted(points, key=lambda point: point.size)
    best: Proposal | None = None
    for left, middle, right in zip(line, line[1:], line[2:], strict=False):
        error = left_out_error(left, middle, right)
        if error <= target_error or (best and error <= best.error):
            continue
        size = _midpoint(left, middle, right, min_gap_ratio=min_gap_ratio)
        if size is not None:
            best = Proposal(size=size, error=error)
    return best


def left_out_error(left: Point, middle: Point, right: Point) -> float:
    """Relative error of predicting `middle` from its neighbours, in log space."""
    share = math.log(middle.size / left.size) / math.log(right.size / left.size)
    predicted_s = left.seconds ** (1.0 - share) * right.seconds**share
    return abs(math.log(predicted_s / middle.seconds))


def propose_case(rows: Sequence[Measurement], *, refined_axes: Sequence[str]) -> Case | None:
    """Propose the next case over all lines of a table; the slowest rank's medians count."""
    best: tuple[float, Case] | None = None
    for case, axis, points in _lines(rows, refined_axes=refined_axes):
        proposal = propose(points)
        if proposal is not None and (best is None or proposal.error > best[0]):
            best = proposal.error, _resized(case, axis=axis, size=proposal.size)
    return None if best is None else best[1]


def _midpoint(left: Point, middle: Point, right: Point, *, min_gap_ratio: float) -> int | None:
    gaps = ((left, middle), (middle, right))
    low, high = max(gaps, key=lambda gap: gap[1].size / gap[0].size)
    size = round(math.sqrt(low.size * high.size))
    wide = high.size / low.size >= min_gap_ratio**2
    return size if wide and low.size < size < high.size else None


def _lines(
    rows: Sequence[Measurement], *, refined_axes: Sequence[str]
) -> Iterator[tuple[Case, str, list[Point]]]:
    """Lines of both directions; each with one of its cases, in its listed direction."""
    seconds: dict[str, float] = {}
    cases: dict[str, Case] = {}
    for row in rows:
        if row.status is Status.OK and row.median_s > 0.0:
            cases[row.case.id] = row.case
            seconds[row.case.id] = max(seconds.get(row.case.id, 0.0), row.median_s)
    for axis in refined_axes:
        lines: dict[tuple[object, ...], dict[int, str]] = {}
        for name, case in cases.items():
            if case.axes[axis] > 0:
                lines.setdefault(_line_of(case, axis), {})[case.axes[axis]] = name
        for line in lines.values():
            points = [Point(size=size, seconds=seconds[name]) for size, name in line.items()]
            case = cases[next(iter(line.values()))]
            listed = case.model_copy(update={"direction": "forward" if case.direction else ""})
            yield listed, axis, points


def _resized(case: Case, *, axis: str, size: int) -> Case:
    axes = case.axes | {axis: size}
    if case.operation == "grouped_gemm":
        # Skew is kept: the fullest expert grows with the rows, which stay evenly divisible.
        axes["tokens"] = max(1, round(size / axes["experts"])) * axes["experts"]
        axes["largest"] = math.ceil(case.axes["largest"] * axes["tokens"] / case.axes["tokens"])
    return case.model_copy(update={"axes": axes})


def _line_of(case: Case, axis: str) -> tuple[object, ...]:
    fixed: Mapping[str, int] = {name: size for name, size in case.axes.items() if name != axis}
    key: list[object] = [case.kind, case.dtype, case.direction]
    for name in AXES[case.operation]:
        if name == axis:
            continue
        if case.operation == "grouped_gemm" and name == "largest":
            key.append(round(case.axes["largest"] / max(case.axes["tokens"], 1), 2))
        else:
            key.append(fixed[name])
    return tuple(key)
