import dataclasses
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.placement_balance import Line, Size, lines

SCRIPT = Path(__file__).with_name("placement_balance.py")
SMALL = Size(layers=6, experts=64, one_workload=((8, 9), (16, 5)), four_families=((8, 9, 0.02),))
ROUTING = SCRIPT.parents[3] / "shared" / "data" / "routing"


def report(*arguments: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--json", "--small", *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode in (0, 1), done.stderr[-2000:]
    result = json.loads(done.stdout)["lines"]
    assert done.returncode == int(not all(line["is_met"] for line in result))
    return list(result)


def check_small_cases(result: list[Line]) -> None:
    gaps = [line for line in result if line.figure in ("gap", "mean gap")]
    assert len(gaps) == 5
    for line in gaps:
        assert line.rule is not None
        assert line.value < 0.5 * line.rule, line
    means = [line for line in result if line.figure.startswith("mean over")]
    assert len(means) == 2
    for line in means:
        assert line.value < 1.0, line


@pytest.mark.slow
def test_small_cases_are_spread_far_better_than_by_the_rule() -> None:
    check_small_cases(list(lines(replace(SMALL, time_scale=0.04, threads=1), None)))


@pytest.mark.slow
def test_the_program_reports_small_cases() -> None:
    fields = [one.name for one in dataclasses.fields(Line)]
    check_small_cases([Line(**{name: line[name] for name in fields}) for line in report()])


# Three folds of two models; the small cases are judged above.
@pytest.mark.slow
def test_recorded_domains_that_were_left_out_are_reported_fold_by_fold() -> None:
    if not ROUTING.is_dir():
        pytest.skip("the recordings are not beside the checkout")
    result = report("--routing", str(ROUTING))
    for case in ("olmoe, 8 x 9", "olmoe, 16 x 5", "mixtral-8x7b, 4 x 3"):
        assert sum(line["case"].startswith(f"{case}, without") for line in result) == 6
        means = [line for line in result if line["case"] == case and "mean over" in line["figure"]]
        assert len(means) == 2
        # On average over three folds, with a little room for chance: a fold varies by some 5 %.
        assert max(line["value"] for line in means) < 1.02
