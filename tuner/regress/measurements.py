"""Compares profiles at acceptance and today: which kinds of operation became slower.

A stored profile is summarised case by case (number of repeats, mean and variance of their
logarithms), so that the earlier one need not be stored. A change counts where it is both large and
significant, by the two limits of profilers/compare.py:

    a case     its repeats then and now, by Welch's test after Holm's correction for all cases
    a family   the logarithms of now over then of all cases of one kind of operation, whose mean is
               compared with zero by Student's test after Holm's correction for all families

The second detects a link that is 10 % slower at every size, which no single case can prove from
five noisy repeats. Source of it: Student, Biometrika 6, 1908.

Other hardware is not comparable. Another driver, library or clock is: detecting that it slows the
machine down is the purpose of the check, so it is compared and named.

Not covered: imported tables and datasheets, which hold no repeats; the plan made from them shows
changes.
"""

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from profilers.compare import (
    MIN_EFFECT_RATIO,
    SIGNIFICANCE,
    LogTimes,
    holm,
    incomplete_beta,
    slowest_rank,
)
from profilers.files import read_bounded
from profilers.records import Machine, Profile, Record
from profilers.store import read_profile
from tuner.plans.folder import MAX_PROFILE_FILE_BYTES
from tuner.regress.records import AcceptedChange, ScenarioVerdict
from tuner.units import format_ratio

HARDWARE: Final = ("device", "device_kind", "threads_per_rank", "world")
MEMORY_RATIO: Final = 0.02
"""Share by which the memory of a device may differ on the same hardware: drivers reserve slightly
different amounts."""
MEAN_DIGITS: Final = 5
"""Decimals that a mean logarithm is stored with: a share of a hundred thousandth."""
VARIANCE_DIGITS: Final = 3
"""Significant digits that a variance is stored with."""

Summed = tuple[int, float, float]
"""Repeats, mean and variance of their logarithms."""


class MeasuredBefore(Record):
    """A stored profile, summed up."""

    sha256: str
    """Hash of the folder's files."""
    machine: Machine
    groups: dict[str, dict[str, Summed]]
    """Cases by id without sizes, then by sizes; cases with fewer than two repeats are left out."""

    @property
    def cases(self) -> dict[str, Summed]:
        """Return the cases by their whole id."""
        return {
            f"{group}/{sizes}": summed
            for group, cases in self.groups.items()
            for sizes, summed in cases.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationComparison:
    """All cases of one kind of operation."""

    name: str
    cases: int
    slower: int
    faster: int
    gone: int
    """Cases that the earlier profile measured and this one did not."""
    ratio: float
    """Geometric mean of new over old times of all cases that both have; 1 without any."""
    p_value: float
    """P-value of the null hypothesis that the operation is unchanged as a whole, corrected for the
    number of families."""
    slower_ratio: float
    """Geometric mean of new over old times of the slower cases."""
    faster_ratio: float

    @property
    def is_shifted(self) -> bool:
        """Return whether all cases together are significantly slower or faster."""
        large = not 1.0 / (1.0 + MIN_EFFECT_RATIO) <= self.ratio <= 1.0 + MIN_EFFECT_RATIO
        return large and self.p_value < SIGNIFICANCE

    @property
    def verdict(self) -> ScenarioVerdict:
        """The verdict of the family."""
        if self.slower or (self.is_shifted and self.ratio > 1.0):
            return ScenarioVerdict.REGRESSION
        if self.gone:
            return ScenarioVerdict.MISSING
        return ScenarioVerdict.BETTER if self.faster or self.is_shifted else ScenarioVerdict.PASS

    @property
    def words(self) -> str:
        """One clause."""
        if self.is_shifted:
            word = "slower" if self.ratio > 1.0 else "faster"
            change = format_ratio(abs(self.ratio - 1.0), digits=0)
            return f"{self.name}: {change} {word} over its {self.cases} cases, significantly"
        if self.slower:
            change = format_ratio(self.slower_ratio - 1.0, digits=0)
            return (
                f"{self.name}: {self.slower} of {self.cases} cases significantly slower, {change}"
            )
        if self.gone:
            return f"{self.name}: {self.gone} cases are no longer measured"
        if self.faster:
            change = format_ratio(1.0 - self.faster_ratio, digits=0)
            return f"{self.name}: {self.faster} of {self.cases} cases faster, {change}"
        return f"{self.name}: no significant change in {self.cases} cases"

    @property
    def change(self) -> AcceptedChange:
        """Return the comparison as numbers."""
        weight = {ScenarioVerdict.REGRESSION: "worse", ScenarioVerdict.BETTER: "better"}
        return AcceptedChange.model_validate(
            {
                "what": f"profile {self.name}",
                "accepted": f"{self.cases} cases",
                "found": f"{self.slower} slower, {self.faster} faster, {self.gone} gone",
                "ratio": self.ratio,
                "weight": weight.get(self.verdict, "neutral"),
            }
        )


def sum_up(folder: Path) -> MeasuredBefore:
    """Read a stored profile and sum it up.

    Raises:
        ProfileUnreadableError: it is missing or damaged.
    """
    profile = read_profile(folder)
    return MeasuredBefore(
        sha256=folder_sha256(folder), machine=profile.header.machine, groups=_summed(profile)
    )


def folder_sha256(folder: Path) -> str:
    """Hash the files of a profile with their names."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.is_file()):
        content = read_bounded(file, most_bytes=MAX_PROFILE_FILE_BYTES)
        digest.update(f"{file.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def other_hardware(before: Machine, now: Machine) -> str:
    """Name the first fact that makes two machines incomparable; empty where they are equal."""
    for fact in HARDWARE:
        old, new = getattr(before, fact), getattr(now, fact)
        if old != new:
            return f"{fact} {old!r} -> {new!r}"
    old_bytes, new_bytes = before.memory_bytes_per_device, now.memory_bytes_per_device
    if abs(new_bytes - old_bytes) > MEMORY_RATIO * old_bytes:
        return f"memory_bytes_per_device {old_bytes} -> {new_bytes}"
    return ""


def other_software(before: Machine, now: Machine) -> tuple[str, ...]:
    """Name what else differs: driver and libraries."""
    facts = {"driver": (before.driver, now.driver)}
    for name in sorted(before.libraries.keys() | now.libraries.keys()):
        facts[name] = (before.libraries.get(name, "none"), now.libraries.get(name, "none"))
    return tuple(f"{name} {old} -> {new}" for name, (old, new) in facts.items() if old != new)


def families(before: MeasuredBefore, now: MeasuredBefore) -> tuple[OperationComparison, ...]:
    """Compare two profiles of one kind of machine, family by family, in the order of their names.

    Cases that only the newer one has say nothing.
    """
    first, second = before.cases, now.cases
    shared = sorted(first.keys() & second.keys())
    raw = [_log_times(first[case]).welch_p(_log_times(second[case])) for case in shared]
    significant = dict(zip(shared, (p_value < SIGNIFICANCE for p_value in holm(raw)), strict=True))
    grouped: dict[str, list[str]] = {}
    for case in sorted(first):
        grouped.setdefault(_family_of(case), []).append(case)
    logs = {case: second[case][1] - first[case][1] for case in shared}
    whole = [student_p([logs[case] for case in of if case in logs]) for of in grouped.values()]
    return tuple(
        _family(name, cases, logs, significant, p_value=p_value)
        for (name, cases), p_value in zip(grouped.items(), holm(whole), strict=True)
    )


def student_p(logs: Sequence[float]) -> float:
    """Two-sided p-value that a sample has mean 0; 1 where fewer than two values say nothing."""
    if len(logs) < 2:
        return 1.0
    mean, error = statistics.fmean(logs), statistics.variance(logs) / len(logs)
    if error <= 0.0:
        return 1.0 if mean == 0.0 else 0.0
    freedom = len(logs) - 1.0
    t_squared = mean**2 / error
    return incomplete_beta(freedom / (freedom + t_squared), a=freedom / 2.0, b=0.5)


def _summed(profile: Profile) -> dict[str, dict[str, Summed]]:
    groups: dict[str, dict[str, Summed]] = {}
    for name, (_, times_s) in sorted(slowest_rank(profile).items()):
        logs = LogTimes.of(times_s)
        if logs is None:
            continue
        group, _, sizes = name.rpartition("/")
        variance = float(f"{logs.variance:.{VARIANCE_DIGITS}g}")
        summed = (logs.repeats, round(logs.mean, MEAN_DIGITS), variance)
        groups.setdefault(group, {})[sizes] = summed
    return groups


def _log_times(summed: Summed) -> LogTimes:
    repeats, mean, variance = summed
    return LogTimes(repeats=repeats, mean=mean, variance=variance)


def _family_of(case: str) -> str:
    """Return operation and kind of a case's id, whose last part are sizes."""
    parts = case.split("/")[:-1]
    words = [part for part in parts if part not in ("forward", "backward")]
    return " ".join(words)


def _family(
    name: str,
    cases: Sequence[str],
    logs: Mapping[str, float],
    significant: Mapping[str, bool],
    *,
    p_value: float,
) -> OperationComparison:
    shared = [case for case in cases if case in logs]
    changed = [math.exp(logs[case]) for case in shared if significant[case]]
    slower = [ratio for ratio in changed if ratio > 1.0 + MIN_EFFECT_RATIO]
    faster = [ratio for ratio in changed if ratio < 1.0 / (1.0 + MIN_EFFECT_RATIO)]
    return OperationComparison(
        name=name,
        cases=len(cases),
        slower=len(slower),
        faster=len(faster),
        gone=len(cases) - len(shared),
        ratio=_geometric_mean([math.exp(logs[case]) for case in shared]),
        p_value=p_value,
        slower_ratio=_geometric_mean(slower),
        faster_ratio=_geometric_mean(faster),
    )


def _geometric_mean(ratios: Sequence[float]) -> float:
    return statistics.geometric_mean(ratios) if ratios else 1.0
