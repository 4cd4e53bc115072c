"""Accuracy of the noise sentinel beside kernels: `python tests/benchmarks/disturbed_kernels.py`.

Kernels of the stored profile `epyc-quickstart-1`, at sizes drawn by the seed, are measured
round-robin ("visits"), with a reading of the sentinel (profilers/noise/sentinel.py) between any two
repeats. Printed are

    taken out   by duration of repeats: exponent of the readings' ratio that explains the slowdown,
                by least squares of ln repeat within each kernel over the mean of ln reading before
                and after; 1 explains all of it
    left        by family: slowdown of repeats between slow readings over those between fast ones,
                raw and with the sentinel's correction (medians over kernels); 0 % is the truth.
                Then the exponent of the GEMMs' slowdown that explains that of whole visits, to
                compare with `sentinel.EXPONENTS`
    visits      deviation of single visits from the median of all (median, P90), and of two sessions
                ("looks") of three visits each from each other: raw and corrected
    of three    deviation of an estimate from three visits from its median, and how much lower than
                single visits it is: mean of all, mean without the slowest, fastest

Meaningful only on a machine with other load; the share of slow readings is printed.
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
from profilers.devices import pick_device, small_gemms
from profilers.noise.cores import Cores
from profilers.noise.policy import NoisePolicy
from profilers.noise.sentinel import EXPONENTS, Sentinel
from profilers.records import Case, Profile
from profilers.registry import load_suite
from profilers.sampled_sizes import drawn, lines
from profilers.store import read_profile
from profilers.team import SingleRank
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
"""Deviations of a visit, in ln, are clipped to this."""
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
    slowdown: float


@dataclass(slots=True)
class Kept(Sentinel):
    """A sentinel that records its corrections and applies none."""

    repeats: list[tuple[float, float, float]] = field(default_factory=list)
    """(how long it lasted, mean of ln reading before and after, slowness)."""

    def slowdown(self, before_s: float, after_s: float, *, lasted_s: float) -> float:
        result = Sentinel.slowdown(self, before_s, after_s, lasted_s=lasted_s)
        self.repeats.append((lasted_s, float(np.log(before_s * after_s)) / 2.0, result))
        return 1.0


Sessions = Mapping[str, Sequence[Sequence[Repeat]]]
"""Id of a case, with its direction, to the repeats of each visit."""


def visited(cases: Sequence[Case], *, visits: int) -> Sessions:
    """Measure all cases round-robin."""
    pick_device("cpu", local_rank=0)
    # No repeat is left out, so that every one stands beside its readings.
    clock = UnmappedClock()
    sentinel = Kept(work=small_gemms(), clock=clock, cores=Cores.of_this_thread())
    noise = NoisePolicy(sentinel=sentinel)
    setting = Setting(
        device="cpu",
        dtypes=("fp32", "bf16"),
        team=SingleRank(),
        clock=clock,
        directory=Path(),
        noise=noise,
    )
    benchmarks = {
        benchmark.operation: benchmark
        for name in ("kernels", "kv")
        for benchmark in load_suite(name)(setting)
    }
    sentinel.calibrate(seconds=1.0)
    result: dict[str, list[list[Repeat]]] = {}
    try:
        for _ in range(visits):
            for case in cases:
                sentinel.begin_case(case.operation)
                sentinel.repeats.clear()
                rows = benchmarks[case.operation].measure(case, budget_s=VISIT_BUDGET_S)
                seen = iter(sentinel.repeats)
                for row in rows:
                    repeats = [
                        Repeat(seconds=s, lasted_s=lasted_s, beside=beside, slowdown=slowdown)
                        for s, (lasted_s, beside, slowdown) in zip(row.times_s, seen, strict=False)
                    ]
                    if repeats:
                        result.setdefault(row.case.id, []).append(repeats)
    finally:
        sentinel.cores.leave()
    return {name: seen for name, seen in result.items() if len(seen) == visits}


def powers(visits: Sessions) -> Iterator[str]:
    """Report the exponent of the readings that explains the slowdown of repeats."""
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


def left(visits: Sessions) -> Iterator[str]:
    """Report the remaining slowdown, by family and direction."""
    beside_N = [r.beside for seen in visits.values() for visit in seen for r in visit]
    quick = float(np.quantile(beside_N, 0.05))
    by_family: dict[str, list[tuple[float, float]]] = {}
    for name, seen in visits.items():
        repeats = [repeat for visit in seen for repeat in visit]
        quiet = [r for r in repeats if r.beside < quick + np.log(QUIET_RATIO)]
        slow = [r for r in repeats if r.beside > quick + np.log(DISTURBED_RATIO)]
        if min(len(quiet), len(slow)) >= LEAST_REPEATS:
            usual_s = statistics.median(r.seconds / r.slowdown for r in quiet)
            as_they_are = statistics.median(r.seconds for r in slow) / usual_s - 1.0
            taken_out = statistics.median(r.seconds / r.slowdown for r in slow) / usual_s - 1.0
            by_family.setdefault(name.partition("/")[0], []).append((as_they_are, taken_out))
    suffered = by_visit(visits)
    for family, result in by_family.items():
        messages = np.median(result, axis=0)
        yield (
            f"{family:13}{len(result):4d}{100.0 * messages[0]:10.1f}%{100.0 * messages[1]:9.1f}%"
            f"{suffered[family]:8.2f}"
        )


def by_visit(visits: Sessions) -> Mapping[str, float]:
    """Return the exponent of the GEMMs' slowdown that explains that of visits, by family."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for name, seen in visits.items():
        family = name.partition("/")[0]
        took_N = np.log([statistics.fmean(r.seconds for r in visit) for visit in seen])
        slower_N = np.array([np.log([r.slowdown for r in visit]).mean() for visit in seen])
        apart_N = np.clip(took_N - np.median(took_N), -MOST_APART, MOST_APART)
        slower_N /= EXPONENTS.get(family, 1.0)
        rows.setdefault(family, []).extend(
            zip(slower_N - slower_N.mean(), apart_N - apart_N.mean(), strict=True)
        )
    result = {family: np.array(pairs).T for family, pairs in rows.items()}
    return {family: float(x_N @ y_N / (x_N @ x_N)) for family, (x_N, y_N) in result.items()}


def of_visits(visits: Sessions, *, is_corrected: bool) -> list[list[float]]:
    """Return the mean seconds of each visit to each kernel."""
    return [
        [
            statistics.fmean(
                repeat.seconds / (repeat.slowdown if is_corrected else 1.0) for repeat in visit
            )
            for visit in seen
        ]
        for seen in visits.values()
    ]


def scatter(times: Sequence[Sequence[float]]) -> str:
    """Report the deviation of visits from their median, and of sessions from each other."""
    away_N = np.array([abs(np.log(s / statistics.median(seen))) for seen in times for s in seen])
    looks = [
        [statistics.median(seen[at : at + LOOK]) for at in range(0, len(seen) - LOOK + 1, LOOK)]
        for seen in times
    ]
    apart_N = np.array([abs(np.log(b / a)) for result in looks for a, b in pairwise(result)])
    return "".join(
        f"{100.0 * value:7.1f}%"
        for value in (*np.quantile(away_N, (0.5, 0.9)), *np.quantile(apart_N, (0.5, 0.9)))
    )


def of_three(times: Sequence[Sequence[float]], counts: Callable[[Sequence[float]], float]) -> str:
    """Report the deviation of an estimate from three visits from its median, and its bias."""
    away, lower = [], []
    for seen in times:
        result = [
            counts(sorted(seen[at : at + LOOK])) for at in range(0, len(seen) - LOOK + 1, LOOK)
        ]
        away += [abs(np.log(s / statistics.median(result))) for s in result]
        lower.append(np.log(statistics.median(result) / statistics.median(seen)))
    messages = (*np.quantile(away, (0.5, 0.9)), np.mean(lower))
    return "".join(f"{100.0 * float(value):7.1f}%" for value in messages)


def main() -> int:
    """Measure, and print the figures."""
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
    """Draw `count` kernels of each family."""
    rng = np.random.default_rng(seed)
    result = []
    for family in FAMILIES:
        on_lines = list(lines(profile.rows(family)).values())
        order = rng.permutation(len(on_lines))
        result += [drawn(on_lines[order[n % len(order)]], rng=rng) for n in range(count)]
    return tuple(result)


if __name__ == "__main__":
    sys.exit(main())
