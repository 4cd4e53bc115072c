import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.dispatch_results import Line, add_result, missed, read_results, table
from tests.patience import patient_s

SCRIPT = Path(__file__).with_name("placement_dispatch.py")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--small", *words],
        capture_output=True,
        text=True,
        timeout=patient_s(280),
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    file = tmp_path_factory.mktemp("dispatch") / "results.jsonl"
    done = run("--json", "--out", str(file))
    assert done.returncode == 0, done.stderr[-2000:]
    assert "1 of 1: synthetic, 8 x 9" in done.stderr
    return file, json.loads(done.stdout)


# Dispatch is chosen and judged in tests/tuner/search/place, too.
@pytest.mark.slow
def test_a_small_case_is_evaluated_under_every_rule(results: tuple[Path, list[Any]]) -> None:
    result = {line["placement"]: line for line in results[1]}
    plans = ["eplb", "even plan", "static plan", "best plan"]
    assert list(result) == [*plans, "static oracle", "near oracle"]
    for line in result.values():
        loads = line["loads"]
        for rule in ("even", "near", "static", "lp", "near_lp"):
            assert loads[rule] >= line["bound"] - 0.01, (line["placement"], rule)
        # A linear program never splits worse than evenly, and lots only add to what is expected.
        assert loads["lp"] <= loads["even"] + 1e-6
        assert loads["static"] >= loads["near"] - 1e-9
    # What is placed for launches has little of the excess over them.
    static, even = (result[name]["loads"]["static"] for name in ("static plan", "even plan"))
    assert static - 1.0 < 0.5 * (even - 1.0)
    best = result["best plan"]["loads"]
    assert best["near_dynamic 32"] > best["near"]
    assert best["dynamic 32"] > best["even"]
    assert result["even plan"]["loads"]["even"] < result["eplb"]["loads"]["even"]
    # Who sees the judged passes is not above who does not, but by what a search leaves.
    for name in plans:
        assert result["near oracle"]["loads"]["near"] <= result[name]["loads"]["near"] + 0.005, name
    assert result["static plan"]["solve_s"] > 0.0
    assert result["best plan"]["dispatch"] == "dynamic"


@pytest.mark.slow
def test_a_case_that_is_done_is_not_run_again(results: tuple[Path, list[Any]]) -> None:
    file, result = results
    lines = file.read_text()
    again = run("--json", "--out", str(file), "--bars", "--case", "synthetic")
    assert again.stderr == ""
    assert json.loads(again.stdout) == result
    assert file.read_text() == lines
    assert again.returncode == int(any(line["missed"] for line in result))


def test_results_of_another_planner_are_not_mixed_in(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    lines = [Line(case="a", placement="eplb", bound=1.0, loads={"even": 1.0})]
    add_result(file, lines, {"code": "old"})
    assert [asdict(line) for line in read_results(file, {"code": "old"})["a"]] == [
        asdict(line) for line in lines
    ]
    with pytest.raises(ValueError, match="name another --out"):
        read_results(file, {"code": "new"})


def test_a_case_that_nothing_is_called_like_is_refused() -> None:
    done = run("--case", "no such")
    assert done.returncode == 2
    assert "no case is called like ['no such']" in done.stderr


def test_bars_are_missed_where_a_plan_is_above_them() -> None:
    def loads(static: float, near: float) -> dict[str, float]:
        return {"static": static, "near": near, "even": near}

    result = {
        "eplb": loads(1.04, 1.04),
        "even plan": loads(1.08, 1.03),
        "static plan": loads(1.05, 1.05),
        "best plan": loads(1.05, 1.03),
    }
    # Half of 0.08 above the bound of 1.0 is 1.04; EPLB's rule has 1.04, too.
    assert [said for _, said in missed(result, 1.0, emitted="dynamic")] == [
        "static: half of the excess",
        "static: above EPLB's rule",
        "expected load",
    ]
    better = {"static plan": loads(1.04, 1.04), "best plan": loads(1.04, 1.02)}
    assert missed(result | better, 1.0, emitted="dynamic") == ()
    # A linear program is judged by what it expects.
    by_lp = result | better | {"best plan": loads(1.04, 1.05) | {"near_lp": 1.01}}
    assert missed(by_lp, 1.0, emitted="lp") == ()
    misses = missed(result, 1.0, emitted="dynamic")
    best = result["best plan"] | {"near_dynamic 32": 1.06}
    result |= {
        "best plan": best,
        "static oracle": loads(1.01, 1.01),
        "near oracle": loads(1.0, 1.005),
    }
    lines = [
        Line(
            case="a, 8 x 9",
            placement=name,
            bound=1.0,
            loads=of,
            dispatch="dynamic" if name == "best plan" else "",
            missed=tuple(said for plan, said in misses if plan == name),
        )
        for name, of in result.items()
    ]
    row = table([lines], (32,)).splitlines()[-1]
    assert row == (
        "| a, 8 \N{MULTIPLICATION SIGN} 9"
        " | 1.040 / 1.080 / 1.050 / 1.010, **not half**, **above EPLB**"
        " | 1.040 / 1.030 / 1.030, **above 1.02** | dynamic | 1.030 | 1.005 | 1.060 |"
    )
