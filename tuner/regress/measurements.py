"""Measurements at acceptance beside those of today: which kinds of operation became slower.

A stored profile is summed up case by case (number of repeats, mean and variance of their
logarithms), so that the former one need not be kept. A case is slower or faster where the change is
both large and significant: profilers/compare.py has the two limits and the test, Welch's after
Holm's correction for the number of cases.

Other hardware is not comparable. Another driver, library or clock is: that it made the machine
slower is what a check is for, so it is compared and named.

Not covered: imported tables and datasheets, which hold no repeats; the plan made from them tells.
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from profilers.compare import MIN_EFFECT_RATIO, SIGNIFICANCE, LogTimes, holm, slowest_rank
from profilers.records import Machine, Profile, Record
from profilers.store import read_profile
from tuner.regress.records import Change, Verdict

HARDWARE: Final = ("device", "device_kind", "threads_per_rank", "world")
MEMORY_RATIO: Final = 0.02
"""Of a device's memory: drivers keep a little more or less of it for themselves."""
MEAN_DIGITS: Final = 5
"""Decimals that a mean logarithm is stored with: a share of a hundred thousandth."""
VARIANCE_DIGITS: Final = 3
"""Significant digits that a variance is stored with."""

Summed = tuple[int, float, float]
"""Repeats, mean and variance of their logarithms."""


class MeasuredBefore(Record):
    """A stored profile, summed up."""

    sha256: str
    """Of the folder's files."""
    machine: Machine
    groups: dict[str, dict[str, Summed]]
    """By the id of a case without its sizes, then by its sizes; cases with fewer than two repeats
    are left out."""

    @property
    def cases(self) -> dict[str, Summed]:
        """By id."""
        return {
            f"{group}/{sizes}": summed
            for group, cases in self.groups.items()
            for sizes, summed in cases.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All cases of one kind of operation."""

    name: str
    cases: int
    slower: int
    faster: int
    gone: int
    """Measured before, and no longer."""
    slower_ratio: float
    """Geometric mean of new over old times of the slower cases; 1 without any."""
    faster_ratio: float

    @property
    def verdict(self) -> Verdict:
        """What the family alone says."""
        if self.slower:
            return Verdict.REGRESSION
        if self.gone:
            return Verdict.MISSING
        return Verdict.BETTER if self.faster else Verdict.PASS

    @property
    def words(self) -> str:
        """One clause."""
        if self.slower:
            change = f"{self.slower_ratio - 1.0:.0%}".replace("%", " %")
            return (
                f"{self.name}: {self.slower} of {self.cases} cases significantly slower, {change}"
            )
        if self.gone:
            return f"{self.name}: {self.gone} cases are no longer measured"
        if self.faster:
            change = f"{1.0 - self.faster_ratio:.0%}".replace("%", " %")
            return f"{self.name}: {self.faster} of {self.cases} cases faster, {change}"
        return f"{self.name}: no significant change in {self.cases} cases"

    @property
    def change(self) -> Change:
        """The same as numbers."""
        ratio = self.slower_ratio if self.slower else self.faster_ratio
        weight = {Verdict.REGRESSION: "worse", Verdict.BETTER: "better"}
        return Change.model_validate(
            {
                "what": f"profile {self.name}",
                "accepted": f"{self.cases} cases",
                "found": f"{self.slower} slower, {self.faster} faster, {self.gone} gone",
                "ratio": ratio,
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
    for file in sorted(each for each in folder.iterdir() if each.is_file()):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()


def other_hardware(before: Machine, now: Machine) -> str:
    """Name the first fact that makes two machines incomparable; empty where they are alike."""
    for fact in HARDWARE:
        one, other = getattr(before, fact), getattr(now, fact)
        if one != other:
            return f"{fact} {one!r} -> {other!r}"
    one, other = before.memory_bytes_per_device, now.memory_bytes_per_device
    if abs(other - one) > MEMORY_RATIO * one:
        return f"memory_bytes_per_device {one} -> {other}"
    return ""


def other_software(before: Machine, now: Machine) -> tuple[str, ...]:
    """Name what else differs: driver and libraries."""
    facts = {"driver": (before.driver, now.driver)}
    for name in sorted(before.libraries.keys() | now.libraries.keys()):
        facts[name] = (before.libraries.get(name, "none"), now.libraries.get(name, "none"))
    return tuple(f"{name} {one} -> {other}" for name, (one, other) in facts.items() if one != other)


def families(before: MeasuredBefore, now: MeasuredBefore) -> tuple[Family, ...]:
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
    ratios = {
        case: math.exp(second[case][1] - first[case][1]) for case in shared if significant[case]
    }
    return tuple(_family(name, cases, ratios, second) for name, cases in grouped.items())


def _summed(profile: Profile) -> dict[str, dict[str, Summed]]:
    found: dict[str, dict[str, Summed]] = {}
    for name, (_, times_s) in sorted(slowest_rank(profile).items()):
        logs = LogTimes.of(times_s)
        if logs is None:
            continue
        group, _, sizes = name.rpartition("/")
        variance = float(f"{logs.variance:.{VARIANCE_DIGITS}g}")
        summed = (logs.repeats, round(logs.mean, MEAN_DIGITS), variance)
        found.setdefault(group, {})[sizes] = summed
    return found


def _log_times(summed: Summed) -> LogTimes:
    repeats, mean, variance = summed
    return LogTimes(repeats=repeats, mean=mean, variance=variance)


def _family_of(case: str) -> str:
    """Return operation and kind of a case's id, whose last part are sizes."""
    parts = case.split("/")[:-1]
    words = [part for part in parts if part not in ("forward", "backward")]
    return " ".join(words)


def _family(
    name: str, cases: Iterable[str], ratios: Mapping[str, float], now: Mapping[str, Summed]
) -> Family:
    listed = tuple(cases)
    changed = [ratios[case] for case in listed if case in ratios]
    slower = [ratio for ratio in changed if ratio > 1.0 + MIN_EFFECT_RATIO]
    faster = [ratio for ratio in changed if ratio < 1.0 / (1.0 + MIN_EFFECT_RATIO)]
    return Family(
        name=name,
        cases=len(listed),
        slower=len(slower),
        faster=len(faster),
        gone=sum(case not in now for case in listed),
        slower_ratio=_geometric_mean(slower),
        faster_ratio=_geometric_mean(faster),
    )


def _geometric_mean(ratios: Iterable[float]) -> float:
    logs = list(_logs(ratios))
    return math.exp(math.fsum(logs) / len(logs)) if logs else 1.0


def _logs(ratios: Iterable[float]) -> Iterator[float]:
    return (math.log(ratio) for ratio in ratios)
