from pathlib import Path

import pytest

from tests.benchmarks.placement_dispatch import SMALL, cases, lines, missed


# Dispatch is chosen and judged in tests/tuner/search/place, too.
@pytest.mark.slow
def test_a_small_case_is_evaluated_under_every_rule(tmp_path: Path) -> None:
    (case,) = cases(SMALL, tmp_path, None)
    result = {line.placement: line for line in lines(case, SMALL, tmp_path)}
    plans = ["eplb", "even plan", "static plan", "best plan"]
    assert list(result) == [*plans, "static oracle", "near oracle"]
    for line in result.values():
        for rule in ("even", "near", "static", "lp", "near_lp"):
            assert line.loads[rule] >= line.bound - 0.01, (line.placement, rule)
        # A linear program never splits worse than evenly, and lots only add to what is expected.
        assert line.loads["lp"] <= line.loads["even"] + 1e-6
        assert line.loads["static"] >= line.loads["near"] - 1e-9
    # What is placed for launches has little of the excess over them.
    static, even = (result[name].loads["static"] for name in ("static plan", "even plan"))
    assert static - 1.0 < 0.5 * (even - 1.0)
    best = result["best plan"].loads
    assert best["near_dynamic 32"] > best["near"]
    assert best["dynamic 32"] > best["even"]
    assert result["even plan"].loads["even"] < result["eplb"].loads["even"]
    # Who sees the judged passes is not above who does not, but by what a search leaves.
    for name in plans:
        assert result["near oracle"].loads["near"] <= result[name].loads["near"] + 0.005, name
    assert (result["static plan"].solve_s or 0.0) > 0.0
    assert result["best plan"].dispatch == "dynamic"


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
