"""Results of `placement_dispatch.py`, case by case: resumable file, bars, table.

A line of the file is one case as JSON: its placements' loads, with the settings and the commit.
Finished cases are not run again; lines of other settings or another commit are refused, so that one
table is of one planner.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

TIMES: Final = "\N{MULTIPLICATION SIGN}"
MOST_OF_BOUND: Final = 1.02
LEAST_CUT: Final = 0.5
ROOT: Final = Path(__file__).parents[2]
PLANNER: Final = ("profilers", "solvers", "tuner")
"""What determines the figures besides the benchmark's settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One placement of one case under every rule."""

    case: str
    placement: str
    bound: float
    loads: dict[str, float]
    dispatch: str = ""
    """The rule that is emitted, where the planner chose."""
    solve_s: float | None = None
    missed: tuple[str, ...] = field(default=())


EXPECTED: Final[Mapping[str, str]] = {"static": "near", "dynamic": "near", "lp": "near_lp"}
"""By the rule that is emitted, what is expected of it beside an all-to-all backend."""
NOISY: Final[Mapping[str, str]] = {
    "static": "static",
    "dynamic": "near_dynamic",
    "lp": "near_lp",
}
"""Rules with random draws."""


def missed(
    result: Mapping[str, Mapping[str, float]], bound: float, *, emitted: str
) -> tuple[tuple[str, str], ...]:
    """Bars that a plan misses, each with the plan's name.

    Args:
        found: loads by rule, of every placement.
        bound: the least load that whole experts allow.
        emitted: the rule of the best plan.
    """
    most = bound + LEAST_CUT * (result["even plan"]["static"] - bound)
    bars = (
        ("static plan", "static: half of the excess", most, "static"),
        ("static plan", "static: above EPLB's rule", result["eplb"]["static"], "static"),
        ("best plan", "expected load", MOST_OF_BOUND * bound, EXPECTED[emitted]),
    )
    return tuple((name, said) for name, said, most, rule in bars if result[name][rule] > most)


def code() -> str:
    """The trees of the planner's packages in the last commit, and whether files differ from it."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    trees = [git("rev-parse", "--short=8", f"HEAD:{package}") for package in PLANNER]
    return "-".join(trees) + ("+changed" if git("status", "--porcelain", *PLANNER) else "")


def read_results(file: Path, settings: Mapping[str, Any]) -> dict[str, list[Line]]:
    """The cases that an earlier run finished.

    Raises:
        ValueError: one was found under other settings or by other code.
    """
    result: dict[str, list[Line]] = {}
    for text in file.read_text("utf-8").splitlines() if file.exists() else ():
        stored = json.loads(text)
        if stored["settings"] != settings:
            raise ValueError(
                f"{file}: {stored['case']!r} was found with {stored['settings']}, this run has"
                f" {dict(settings)}; name another --out"
            )
        result[stored["case"]] = [
            Line(**line | {"missed": tuple(line["missed"])}) for line in stored["lines"]
        ]
    return result


def add_result(file: Path, lines: Sequence[Line], settings: Mapping[str, Any]) -> None:
    """Append a finished case."""
    stored = {
        "case": lines[0].case,
        "settings": dict(settings),
        "lines": [asdict(line) for line in lines],
    }
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(stored) + "\n")


def text_of(line: Line) -> str:
    """One placement as text."""
    loads = "  ".join(f"{name} {value:.4f}" for name, value in line.loads.items())
    rule = f"  emitted with {line.dispatch}" if line.dispatch else ""
    spent = "" if line.solve_s is None else f"  ({line.solve_s:.0f} s)"
    bad = "".join(f"  MISSED {said}" for said in line.missed)
    return f"{line.case}: {line.placement:<13} bound {line.bound:.4f}  {loads}{rule}{spent}{bad}"


def table(cases: Sequence[Sequence[Line]], tokens: Sequence[int]) -> str:
    """The README's table."""
    noisy = " / ".join(f"{each:,}" for each in tokens)
    head = (
        "case",
        "`static`: EPLB / even plan / static plan / oracle",
        "expected beside a backend: EPLB / even plan / best plan",
        "emitted with",
        "floor",
        "oracle",
        f"noisy maximum of the best plan at {noisy} tokens a rank",
    )
    rows = [head, ("---",) * len(head), *(_row(lines, tokens) for lines in cases)]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _row(lines: Sequence[Line], tokens: Sequence[int]) -> tuple[str, ...]:
    of = {line.placement: line for line in lines}
    misses = {said for line in lines for said in line.missed}
    rule = of["best plan"].dispatch
    static = [of[name].loads["static"] for name in ("eplb", "even plan", "static plan")]
    expected = [of[name].loads["near"] for name in ("eplb", "even plan")]
    expected.append(of["best plan"].loads[EXPECTED[rule]])
    words = {
        "static: half of the excess": ", **not half**",
        "static: above EPLB's rule": ", **above EPLB**",
    }
    return (
        lines[0].case.replace(" x ", f" {TIMES} "),
        _numbers([*static, of["static oracle"].loads["static"]])
        + "".join(word for said, word in words.items() if said in misses),
        _numbers(expected) + (", **above 1.02**" if "expected load" in misses else ""),
        rule,
        _numbers([of["even plan"].loads["even"]]),
        _numbers([of["near oracle"].loads["near"]]),
        _numbers([of["best plan"].loads[f"{NOISY[rule]} {each}"] for each in tokens]),
    )


def _numbers(values: Sequence[float]) -> str:
    return " / ".join(f"{value:.3f}" for value in values)
