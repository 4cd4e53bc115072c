"""What a sentinel beside kernels tells: `python tests/benchmarks/disturbed_kernels.py`.

Kernels of the stored profile `epyc-quickstart-1`, at sizes drawn by the seed, are visited in turns,
with a reading of the sentinel (profilers/sentinel.py) between any two repeats. Printed are

    taken out   for repeats by how long they last: by which power of the readings' ratio they were
                longer, the least squares of ln repeat inside each kernel over the mean of ln
                reading before and after; 1 is all of it
    left        by family: how much longer repeats of a kernel are between slow readings than
                between quick ones, as they are and with what the sentinel saw taken out (medians
                over kernels); 0 % is the truth, as quick readings leave a repeat alone. Then by
                which power of what the products suffer whole visits were longer, to compare with
                `sentinel.POWERS`
    visits      how far single visits lie from the median of all (median, 90th percentile), and two
                looks of three visits each from each other: with their repeats as they are, and with
                what the sentinel saw taken out
    of three    how far what counts of three visits lies from its median, and how much lower than
                single visits: all repeats, those without the slowest visit, the fastest visit

It means something only on a machine that others disturb; the share of slow readings is printed.
"""

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from profilers.benchmark import Setting
from profilers.cores import Cores
from profilers.devices import pick_device, small_products
from profilers.records import Case, Profile
from profilers.registry import load_suite
from profilers.sampled_sizes import drawn, lines
from profilers.sentinel import POWERS, Sentinel
from profilers.store import read_profile
from profilers.team import Alone
from tests.profilers.testing import UnmappedClock

STORED = Path(__file__).parents[2] / "examples/profiles/epyc-quickstart-1/used/profile"
FAMILIES = (
    "gemm",
    "grouped_gemm",
    "attention",
    "memory_bound",
    "optimizer",
    "copy",
    "kv_conversion",
)
MOST_APART = 0.8
"""A visit further from its kernel's others, in ln, counts as this far."""
LASTING_S = (0.0, 1e-3, 4e-3, 16e-3, 64e-3)
SLOW_RATIO = 1.12
QUIET_RATIO, DISTURBED_RATIO = 1.03, 1.2
LEAST_REPEATS = 4
VISIT_BUDGET_S = 0.02
LOOK = 3
"""Visits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """One repeat of a kernel."""

    seconds: float
    """Of one run, as the clock says."""
    lasted_s: float
    beside: float
    """Mean of ln reading before and after."""
    slowness: float


@dataclass(slots=True)
class Kept(Sentinel):
    """A sentinel that takes nothing out and keeps what it would have."""

    repeats: list[tuple[float, float, float]] = field(default_factory=list)
    """(how long it lasted, mean of ln reading before and after, slowness)."""

    def slowness(self, before_s: float, after_s: float, *, lasted_s: float) -> float:
        found = Sentinel.slowness(self, before_s, after_s, lasted_s=lasted_s)
        self.repeats.append((lasted_s, float(np.log(before_s * after_s)) / 2.0, found))
        return 1.0


Visits = Mapping[str, Sequence[Sequence[Repeat]]]
"""Id of a case, with its direction, to the repeats of each visit."""


def visited(cases: Sequence[Case], *, visits: int) -> Visits:
    """Visit all cases in turns."""
    pick_device("cpu", local_rank=0)
    # No repeat is left out, so that every one stands beside its readings.
    clock = UnmappedClock()
    sentinel = Kept(work=small_products(), clock=clock, cores=Cores.of_this_thread())
    setting = Setting(
        device="cpu",
        dtypes=("fp32", "bf16"),
        team=Alone(),
        clock=clock,
        directory=Path(),
        sentinel=sentinel,
    )
    benches = {
        bench.operation: bench for name in ("kernels", "kv") for bench in load_suite(name)(setting)
    }
    sentinel.look_around(seconds=1.0)
    found: dict[str, list[list[Repeat]]] = {}
    try:
        for _ in range(visits):
            for case in cases:
                sentinel.begin(case.operation)
                sentinel.repeats.clear()
                rows = benches[case.operation].measure(case, budget_s=VISIT_BUDGET_S)
                seen = iter(sentinel.repeats)
                for row in rows:
                    repeats = [
                        Repeat(seconds=s, lasted_s=lasted_s, beside=beside, slowness=slowness)
                        for s, (lasted_s, beside, slowness) in zip(row.times_s, seen, strict=False)
                    ]
                    if repeats:
                        found.setdefault(row.case.id, []).append(repeats)
    finally:
        sentinel.cores.leave()
    return {name: seen for name, seen in found.items() if len(seen) == visits}


def powers(visits: Visits) -> Iterator[str]:
    """Tell by which power of the readings repeats were longer."""
    rows = []
    for seen in visits.values():
        repeats = [repeat for visit in seen for repeat in visit]
        longer_N = np.log([repeat.seconds for repeat in repeats])
        beside_N = np.array([repeat.beside for repeat in repeats])
        lasted_s = statistics.median(repeat.lasted_s for repeat in repeats)
        rows += [
            (lasted_s, x, y)
            for x, y in zip(beside_N - beside_N.mean(), longer_N - np.median(longer_N), strict=True)
        ]
    rows_N3 = np.array(rows)
    for low_s, high_s in pairwise(LASTING_S):
        _, x_N, y_N = rows_N3[(rows_N3[:, 0] >= low_s) & (rows_N3[:, 0] < high_s)].T
        if len(x_N):
            power = float(x_N @ y_N / (x_N @ x_N))
            yield f"{1e3 * low_s:3.0f} to {1e3 * high_s:2.0f} ms {len(x_N):6d} {power:6.2f}"


def left(visits: Visits) -> Iterator[str]:
    """Tell what remains of disturbances, by family and direction."""
    beside_N = [r.beside for seen in visits.values() for visit in seen for r in visit]
    quick = float(np.quantile(beside_N, 0.05))
    by_family: dict[str, list[tuple[float, float]]] = {}
    for name, seen in visits.items():
        repeats = [repeat for visit in seen for repeat in visit]
        quiet = [r for r in repeats if r.beside < quick + np.log(QUIET_RATIO)]
        slow = [r for r in repeats if r.beside > quick + np.log(DISTURBED_RATIO)]
        if min(len(quiet), len(slow)) >= LEAST_REPEATS:
            usual_s = statistics.median(r.seconds / r.slowness for r in quiet)
            as_they_are = statistics.median(r.seconds for r in slow) / usual_s - 1.0
            taken_out = statistics.median(r.seconds / r.slowness for r in slow) / usual_s - 1.0
            by_family.setdefault(name.partition("/")[0], []).append((as_they_are, taken_out))
    suffered = by_visit(visits)
    for family, found in by_family.items():
        told = np.median(found, axis=0)
        yield (
            f"{family:13}{len(found):4d}{100.0 * told[0]:10.1f}%{100.0 * told[1]:9.1f}%"
            f"{suffered[family]:8.2f}"
        )


def by_visit(visits: Visits) -> Mapping[str, float]:
    """Take the power of what the products suffer by which visits were longer, by family."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for name, seen in visits.items():
        family = name.partition("/")[0]
        took_N = np.log([statistics.fmean(r.seconds for r in visit) for visit in seen])
        slower_N = np.array([np.log([r.slowness for r in visit]).mean() for visit in seen])
        apart_N = np.clip(took_N - np.median(took_N), -MOST_APART, MOST_APART)
        slower_N /= POWERS.get(family, 1.0)
        rows.setdefault(family, []).extend(
            zip(slower_N - slower_N.mean(), apart_N - apart_N.mean(), strict=True)
        )
    found = {family: np.array(pairs).T for family, pairs in rows.items()}
    return {family: float(x_N @ y_N / (x_N @ x_N)) for family, (x_N, y_N) in found.items()}


def of_visits(visits: Visits, *, is_corrected: bool) -> list[list[float]]:
    """Take the mean seconds of each visit to each kernel."""
    return [
        [
            statistics.fmean(
                repeat.seconds / (repeat.slowness if is_corrected else 1.0) for repeat in visit
            )
            for visit in seen
        ]
        for seen in visits.values()
    ]


def scatter(times: Sequence[Sequence[float]]) -> str:
    """Tell how far visits lie from their median, and looks from each other."""
    away_N = np.array([abs(np.log(s / statistics.median(seen))) for seen in times for s in seen])
    looks = [
        [statistics.median(seen[at : at + LOOK]) for at in range(0, len(seen) - LOOK + 1, LOOK)]
        for seen in times
    ]
    apart_N = np.array([abs(np.log(b / a)) for found in looks for a, b in pairwise(found)])
    return "".join(
        f"{100.0 * value:7.1f}%"
        for value in (*np.quantile(away_N, (0.5, 0.9)), *np.quantile(apart_N, (0.5, 0.9)))
    )


def of_three(times: Sequence[Sequence[float]], counts: Callable[[Sequence[float]], float]) -> str:
    """Tell how far what counts of three visits lies from its median, and how low it lies."""
    away, lower = [], []
    for seen in times:
        found = [
            counts(sorted(seen[at : at + LOOK])) for at in range(0, len(seen) - LOOK + 1, LOOK)
        ]
        away += [abs(np.log(s / statistics.median(found))) for s in found]
        lower.append(np.log(statistics.median(found) / statistics.median(seen)))
    told = (*np.quantile(away, (0.5, 0.9)), np.mean(lower))
    return "".join(f"{100.0 * float(value):7.1f}%" for value in told)


def main() -> int:
    """Visit, and tell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", type=int, default=16, help="of each family")
    parser.add_argument("--visits", type=int, default=12)
    options = parser.parse_args()
    if options.visits < 2 * LOOK:
        parser.error(f"--visits must be {2 * LOOK} at least")
    visits = visited(
        sizes(read_profile(STORED), count=options.sizes, seed=options.seed), visits=options.visits
    )
    if not visits:
        sys.exit("no kernel could be measured")
    readings_N = np.array([r.beside for seen in visits.values() for one in seen for r in one])
    slow = np.mean(readings_N > np.quantile(readings_N, 0.05) + np.log(SLOW_RATIO))
    raw, corrected = (of_visits(visits, is_corrected=is_it) for is_it in (False, True))
    lines_out = [
        f"{len(visits)} kernels, {options.visits} visits; {slow:.0%} of the readings were slow",
        "repeats that last   number  power",
        *powers(visits),
        "left        kernels  as it is  taken out  power",
        *left(visits),
        "visits         median     P90  looks     P90",
        f"as they are  {scatter(raw)}",
        f"taken out    {scatter(corrected)}",
        "of three       median     P90   lower",
        f"all          {of_three(corrected, statistics.fmean)}",
        f"less slowest {of_three(corrected, lambda seen: statistics.fmean(seen[:-1]))}",
        f"fastest      {of_three(corrected, min)}",
    ]
    sys.stdout.write("\n".join(lines_out) + "\n")
    return 0


def sizes(profile: Profile, *, count: int, seed: int) -> tuple[Case, ...]:
    """Draw kernels, so many of each family."""
    rng = np.random.default_rng(seed)
    found = []
    for family in FAMILIES:
        on_lines = list(lines(profile.table(family)).values())
        order = rng.permutation(len(on_lines))
        found += [drawn(on_lines[order[n % len(order)]], rng=rng) for n in range(count)]
    return tuple(found)


if __name__ == "__main__":
    sys.exit(main())
