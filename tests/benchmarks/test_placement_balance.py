from dataclasses import replace

import pytest

from tests.benchmarks.placement_balance import Size, lines

SMALL = Size(layers=6, experts=64, one_workload=((8, 9), (16, 5)), four_families=((8, 9, 0.02),))


@pytest.mark.slow
def test_small_cases_are_spread_far_better_than_by_the_rule() -> None:
    result = list(lines(replace(SMALL, time_scale=0.04, threads=1), None))
    gaps = [line for line in result if line.figure in ("gap", "mean gap")]
    assert len(gaps) == 5
    for line in gaps:
        assert line.rule is not None
        assert line.value < 0.5 * line.rule, line
    means = [line for line in result if line.figure.startswith("mean over")]
    assert len(means) == 2
    for line in means:
        assert line.value < 1.0, line
