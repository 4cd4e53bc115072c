"""Compare two profiles case by case: which times really changed.

A difference counts when it is both large and significant: the ratio of medians is beyond
`MIN_EFFECT_RATIO`, and Welch's test on the logarithms of the repeats rejects equality at
`SIGNIFICANCE` after Holm's correction for the number of cases. A rank test would see nothing here:
with the three repeats that slow cases have, its p-value cannot fall below 0.1, which no correction
for hundreds of cases survives. Repeats of one run share that run's conditions, so significance says
that the two runs differ, not why.

Sources: Welch, Biometrika 34, 1947; Holm, Scandinavian Journal of Statistics 6, 1979; the
incomplete beta function by Lentz's continued fraction, Applied Optics 15, 1976.

Profiles of different machines are refused, and every fact that differs is named; who wants to
see the effect of just that (a new driver, another kind of node) compares them anyway.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from profilers.errors import MachineMismatchError
from profilers.records import Case, Machine, MeasurementStatus, Profile, Record, Seconds, Source

MIN_EFFECT_RATIO = 0.05
SIGNIFICANCE = 0.05
MAX_FRACTIONS = 500


class CaseVerdict(StrEnum):
    """Verdict on one case of two profiles."""

    SAME = "same"
    """Within the noise, or too small to matter."""
    SLOWER = "slower"
    """The second profile is significantly slower."""
    FASTER = "faster"
    """The second profile is significantly faster."""
    ONLY_FIRST = "only_first"
    """The second profile did not measure it, or it failed there."""
    ONLY_SECOND = "only_second"
    """The first profile did not measure it, or it failed there."""


class Difference(Record):
    """One case in two profiles."""

    case: Case
    verdict: CaseVerdict
    first_s: Seconds | None = None
    """Median of the slowest rank; absent when not measured."""
    second_s: Seconds | None = None
    ratio: float | None = None
    """Second over first; absent where no number can say it."""
    p_value: float | None = None
    """Corrected for the number of cases; absent where there was nothing to test."""


class LogTimes(Record):
    """Logarithms of the repeats of one case: all that Welch's test needs of them."""

    repeats: Annotated[int, Field(ge=2)]
    mean: Annotated[float, Field(allow_inf_nan=False)]
    variance: Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

    @classmethod
    def of(cls, times_s: Sequence[float]) -> "LogTimes | None":
        """Sum up repeats; None where fewer than two, or one of no length, say nothing."""
        if len(times_s) < 2 or min(times_s) <= 0.0:
            return None
        logs = [math.log(time_s) for time_s in times_s]
        mean, variance = statistics.fmean(logs), statistics.variance(logs)
        return cls(repeats=len(logs), mean=mean, variance=variance)

    def welch_p(self, second: "LogTimes") -> float:
        """Two-sided p-value that both samples have one mean logarithm."""
        errors = [sample.variance / sample.repeats for sample in (self, second)]
        distance = abs(self.mean - second.mean)
        if sum(errors) <= 0.0:
            return 1.0 if distance == 0.0 else 0.0
        freedom = sum(errors) ** 2 / sum(
            error**2 / (sample.repeats - 1)
            for error, sample in zip(errors, (self, second), strict=True)
        )
        t_squared = distance**2 / sum(errors)
        return incomplete_beta(freedom / (freedom + t_squared), a=freedom / 2.0, b=0.5)


def compare(first: Profile, second: Profile, *, anyway: bool = False) -> tuple[Difference, ...]:
    """Compare every case of two profiles, in the order of their ids.

    Args:
        first: the profile to compare with.
        second: the newer one.
        anyway: compare profiles of different machines too.

    Raises:
        MachineMismatchError: the machines differ, or the ranks are laid out otherwise.
    """
    differing = incomparable(first.header.machine, second.header.machine)
    if differing and not anyway:
        raise MachineMismatchError(
            f"the profiles are not comparable: {'; '.join(differing)}; measure both on one machine,"
            " or add --anyway to see what the difference makes"
        )
    times_before, times_after = slowest_rank(first), slowest_rank(second)
    shared = sorted(times_before.keys() & times_after.keys())
    raw = [welch_p(times_before[name][1], times_after[name][1]) for name in shared]
    p_values = dict(zip(shared, holm(raw), strict=True))
    rows = []
    for name in sorted(times_before.keys() | times_after.keys()):
        if name not in times_after:
            rows.append(_only(*times_before[name], verdict=CaseVerdict.ONLY_FIRST))
        elif name not in times_before:
            rows.append(_only(*times_after[name], verdict=CaseVerdict.ONLY_SECOND))
        else:
            case, before = times_before[name]
            rows.append(_difference(case, before, times_after[name][1], p_value=p_values[name]))
    return tuple(rows)


def welch_p(first_s: Sequence[float], second_s: Sequence[float]) -> float:
    """Two-sided p-value that both samples have one mean logarithm; 1 when nothing can be said."""
    first, second = LogTimes.of(first_s), LogTimes.of(second_s)
    return 1.0 if first is None or second is None else first.welch_p(second)


def incomplete_beta(x: float, *, a: float, b: float) -> float:
    """Regularised incomplete beta function I_x(a, b) for x in [0, 1]."""
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - incomplete_beta(1.0 - x, a=b, b=a)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    front = math.exp(log_front + a * math.log(x) + b * math.log1p(-x)) / a
    value, upper, lower = 1.0, math.inf, 1.0
    for step in range(MAX_FRACTIONS):
        m, odd = divmod(step + 1, 2)
        if odd:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1.0 / (1.0 + term * lower)
        upper = 1.0 + term / upper
        value *= lower * upper
        if abs(lower * upper - 1.0) < 1e-12:
            break
    return front * value


def holm(p_values: Sequence[float]) -> tuple[float, ...]:
    """Correct p-values for their number, step down; order kept."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    corrected = [1.0] * len(p_values)
    largest = 0.0
    for place, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - place) * p_values[index]))
        corrected[index] = largest
    return tuple(corrected)


def incomparable(first: Machine, second: Machine) -> tuple[str, ...]:
    """Name every fact of two machines that makes their times another matter; empty where none does.

    Facts that one profile does not hold, as those of earlier releases, are no difference.
    """
    rows = list(first.differences(second))
    if first.world != second.world:
        rows.append(f"ranks: {first.world} here, {second.world} there")
    per_node = first.ranks_per_node, second.ranks_per_node
    if first.world == second.world and all(per_node) and per_node[0] != per_node[1]:
        rows.append(f"ranks per node: {per_node[0]} here, {per_node[1]} there")
    if first.oversubscribed != second.oversubscribed:
        here, there = (
            "shared by ranks" if machine.oversubscribed else "one rank each"
            for machine in (first, second)
        )
        rows.append(f"cores or accelerators: {here} here, {there} there")
    return tuple(rows)


def slowest_rank(profile: Profile) -> Mapping[str, tuple[Case, tuple[float, ...]]]:
    """Return every measured case by its id, with the repeats of the rank of the largest median."""
    slowest: dict[str, tuple[Case, tuple[float, ...]]] = {}
    for row in profile.measurements:
        if row.status is not MeasurementStatus.OK or row.source is not Source.MEASURED:
            continue
        known = slowest.get(row.case.id)
        if known is None or statistics.median(known[1]) < row.median_s:
            slowest[row.case.id] = row.case, row.times_s
    return slowest


def _only(case: Case, times_s: tuple[float, ...], *, verdict: CaseVerdict) -> Difference:
    median_s = statistics.median(times_s)
    if verdict is CaseVerdict.ONLY_FIRST:
        return Difference(case=case, verdict=verdict, first_s=median_s)
    return Difference(case=case, verdict=verdict, second_s=median_s)


def _difference(
    case: Case, before: Sequence[float], after: Sequence[float], *, p_value: float
) -> Difference:
    first_s, second_s = statistics.median(before), statistics.median(after)
    ratio = second_s / first_s if first_s > 0.0 else math.inf
    verdict = CaseVerdict.SAME
    if p_value < SIGNIFICANCE and ratio > 1.0 + MIN_EFFECT_RATIO:
        verdict = CaseVerdict.SLOWER
    elif p_value < SIGNIFICANCE and ratio < 1.0 / (1.0 + MIN_EFFECT_RATIO):
        verdict = CaseVerdict.FASTER
    return Difference(
        case=case,
        verdict=verdict,
        first_s=first_s,
        second_s=second_s,
        ratio=ratio if math.isfinite(ratio) else None,
        p_value=p_value,
    )
