"""Interpolation error of a profile: `python tests/benchmarks/profile_interpolation.py`.

A full profile is measured, with the budget given. Then sizes are drawn log-uniformly inside the
measured ranges, by the seed: odd sizes that the profile does not hold, equally many of every
family, its kinds and types taken evenly (profilers/sampled_sizes.py states which sizes keep the
operation the same). Each is predicted from the profile and measured right after, in two sessions
("looks"). A session measures every size a number of times ("visits"), round-robin; the median
counts. Printed are, per family and over all:

    n               times compared: directions count separately
    median, p90     of |predicted / measured - 1|, measured in the first session
    noise           the same between the first session and the second: a lower limit for predictions
    one visit       the same between the first two visits
    fastest         of |predicted / measured - 1| with a session's fastest visit instead

Times of several ranks are those of the group (profilers/series.py). Not included: arrival skew and
links, whose sizes are ranks, and storage, whose repeats differ severalfold on a shared disk. The
figures are meaningful only on an idle machine. Exit code 1: a bar below is missed, or a time is
missing.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from profilers.interpolation import fit_curves
from profilers.records import Case, Profile
from profilers.sampled_sizes import SIZES, drawn, lines
from profilers.series import Key, key_of, together_s
from profilers.session import measure_profile
from profilers.store import read_profile
from tests.benchmarks.bars import parse, say, timed

MOST_PROFILE_S = 60.0
MOST_MEDIAN_RATIO = 0.05
MOST_P90_RATIO = 0.15

SUITES = ("kernels", "links", "storage", "kv")


def sizes(profile: Profile, *, count: int, rng: np.random.Generator) -> tuple[Case, ...]:
    """Draw unmeasured cases, evenly over the families and over the lines of each."""
    by_family = {
        operation: tuple(lines(profile.rows(operation)).values())
        for operation in SIZES
        if profile.rows(operation)
    }
    known = {row.case.id for row in profile.measurements}
    chosen: dict[str, Case] = {}
    families = list(by_family)
    for number in range(100 * count):
        if len(chosen) == count:
            break
        operation = families[number % len(families)]
        of_family = by_family[operation]
        case = drawn(of_family[int(rng.integers(len(of_family)))], rng=rng)
        if case.id not in known:
            chosen[case.id] = case
    return tuple(chosen.values())


def measured_again(
    profile: Path, cases: Sequence[Case], *, budget_s: float, ranks: int | None
) -> Mapping[Key, float]:
    """Measure the cases on a copy of the profile; seconds of the whole group of ranks."""
    wanted = {key_of(turned) for case in cases for turned in _directions(case)}
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        copy = Path(scratch) / "profile"
        shutil.copytree(profile, copy)
        measure_profile(
            copy,
            suites=SUITES,
            budget_s=budget_s,
            ranks=ranks,
            resume=True,
            device="cpu",
            extra_cases=cases,
        )
        # The profile's own rows must not say what these messages wait.
        result = together_s(read_profile(copy).measurements, shared=False)
        return {
            (series, place): seconds
            for series, measured in result.items()
            for place, seconds in measured.items()
            if (series, place) in wanted
        }


def compared(
    profile: Profile, looks: Sequence[Sequence[Mapping[Key, float]]]
) -> list[dict[str, Any]]:
    """A row for each time: predicted, and measured by two sessions of several visits each."""
    curves = fit_curves(profile)
    visits = [visit for look in looks for visit in look]
    rows = []
    for series, place in visits[0]:
        if all((series, place) in visit for visit in visits):
            seconds, outside = curves[series].predict(np.array([place], dtype=np.float64))
            rows.append(
                {
                    "series": "/".join(part for part in series if part),
                    "family": series.operation,
                    "sizes": place,
                    "predicted_s": float(seconds[0]),
                    "measured_s": [
                        statistics.median(visit[series, place] for visit in look) for look in looks
                    ],
                    "fastest_s": min(visit[series, place] for visit in looks[0]),
                    "visits_s": [visit[series, place] for visit in visits],
                    "is_extrapolated": bool(outside[0]),
                }
            )
    return rows


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Errors per family and over all."""
    families = {family: [r for r in rows if r["family"] == family] for family in SIZES}
    groups = {name: result for name, result in families.items() if result}
    return {name: _errors(result) for name, result in [*groups.items(), ("all", list(rows))]}


def _errors(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    predicted_N = np.array([row["predicted_s"] for row in rows])
    first_N, second_N = np.array([row["measured_s"] for row in rows]).T
    fastest_N = np.array([row["fastest_s"] for row in rows])
    one_N, other_N = np.array([row["visits_s"][:2] for row in rows]).T
    printed: dict[str, float] = {"n": len(rows)}
    for name, error_N in (
        ("", np.abs(predicted_N / first_N - 1.0)),
        ("noise_", np.abs(second_N / first_N - 1.0)),
        ("visit_", np.abs(other_N / one_N - 1.0)),
        ("fastest_", np.abs(predicted_N / fastest_N - 1.0)),
    ):
        printed[f"{name}median_ratio"] = float(np.median(error_N))
        printed[f"{name}p90_ratio"] = float(np.quantile(error_N, 0.9))
    return printed


def _directions(case: Case) -> tuple[Case, ...]:
    if not case.direction:
        return (case,)
    return (case, case.model_copy(update={"direction": "backward"}))


def _text(report: Mapping[str, Any]) -> str:
    checked: Mapping[str, Any] = report["stated"]
    columns = ("median", "noise", "1 visit", "fastest", "stated")
    titles = "".join(f"{title:>9}{'p90':>8}" for title in columns)
    lines_out = [
        f"profile: {report['profile_s']:.1f} s of wall time, {report['ranks']} ranks, "
        f"{report['rows']} rows; seed {report['seed']}, {report['sizes']} sizes, "
        f"{report['missing']} times missing",
        f"{'family':14}{'n':>5}{titles}",
    ]
    for name, result in report["families"].items():
        cells = [
            result[f"{prefix}{which}_ratio"]
            for prefix in ("", "noise_", "visit_", "fastest_")
            for which in ("median", "p90")
        ]
        if printed := checked.get(name):
            cells += [printed["median_ratio"], printed["p90_ratio"]]
        widths = (8, 7) * (len(cells) // 2)
        pairs = zip(cells, widths, strict=True)
        text = "".join(f"{100.0 * cell:{width}.1f}%" for cell, width in pairs)
        lines_out.append(f"{name:14}{result['n']:5d}{text}")
    bars = (
        f"at most {MOST_PROFILE_S:.0f} s, median {MOST_MEDIAN_RATIO:.0%}, P90 {MOST_P90_RATIO:.0%}"
    )
    lines_out.append(f"asked: {bars}: {'reached' if report['reached'] else 'missed'}")
    return "\n".join(lines_out)


def main() -> int:
    """Measure, draw, predict, measure again."""
    options = parse(
        __doc__,
        {
            "--seed": 0,
            "--sizes": 200,
            "--ranks": 1,
            "--budget": 60.0,
            "--visits": 9,
            # Seconds to visit all sizes once.
            "--again": 30.0,
            "--json": (Path, None),
        },
    )
    with tempfile.TemporaryDirectory(prefix="moetune-") as scratch:
        path = Path(scratch) / "profile"
        _, profile_s, _ = timed(
            lambda: measure_profile(
                path, suites=SUITES, budget_s=options.budget, ranks=options.ranks, device="cpu"
            )
        )
        profile = read_profile(path)
        cases = sizes(profile, count=options.sizes, rng=np.random.default_rng(options.seed))
        looks = [
            [
                measured_again(path, cases, budget_s=options.again, ranks=options.ranks)
                for _ in range(options.visits)
            ]
            for _ in range(2)
        ]
    rows = compared(profile, looks)
    if not rows:
        sys.exit("no size could be measured again; give more time with --again")
    report: dict[str, Any] = {
        "seed": options.seed,
        "ranks": options.ranks,
        "profile_s": profile_s,
        "rows": len(profile.measurements),
        "sizes": len(cases),
        "missing": _missing(cases, rows),
        "families": summary(rows),
        "tables": {name: info.model_dump() for name, info in profile.header.tables.items()},
        "stated": {
            name: info.checked.model_dump()
            for name, info in profile.header.tables.items()
            if info.checked
        },
    }
    report["reached"] = reached(report)
    say(_text(report))
    if options.json:
        options.json.write_text(json.dumps(report | {"times": rows}, indent=1), encoding="utf-8")
    return int(not report["reached"])


def reached(report: Mapping[str, Any]) -> bool:
    """Whether nothing is missing and every bar is met."""
    result = report["families"]["all"]
    return (
        not report["missing"]
        and report["profile_s"] <= MOST_PROFILE_S
        and result["median_ratio"] <= MOST_MEDIAN_RATIO
        and result["p90_ratio"] <= MOST_P90_RATIO
    )


def _missing(cases: Sequence[Case], rows: Sequence[Mapping[str, Any]]) -> int:
    """Number of missing times: they failed, or `--again` was too short."""
    return sum(len(_directions(case)) for case in cases) - len(rows)


if __name__ == "__main__":
    sys.exit(main())
