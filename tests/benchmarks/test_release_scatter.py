"""Scatter of one recipe between releases, separated from errors of the model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.release_scatter import recipes_of, release_scatter
from tuner.backtest.columns import PublishedRun, build_run
from tuner.backtest.rows import read_rows

RUNS = Path(__file__).parents[1] / "tuner/backtest/runs.csv"


def _run(release: str, seconds: float, **numbers: float) -> PublishedRun:
    (base,) = (row for row in read_rows(RUNS) if row.id == "dense-a")
    texts = {**base.texts, "release": release}
    numbers = {**base.numbers, "step_time_s": seconds, **numbers}
    return build_run(replace(base, texts=texts, numbers=numbers))


def test_runs_that_differ_in_the_release_alone_are_one_recipe() -> None:
    runs = [
        _run("nemo-26.02", 1.0),
        _run("nemo-26.04", 2.0),
        _run("nemo-26.04", 3.0, mbs=2.0),
        _run("", 4.0),
    ]
    assert recipes_of(runs) == [[0, 1]]
    assert recipes_of(runs[1:]) == []
    assert release_scatter(runs[1:], np.ones(3)) is None


def test_scatter_and_missing_terms_are_separated() -> None:
    # Times 1 and 4, mean 2: one number is off by 100 and 50 %. Predictions of 1.1 times the mean
    # whatever the release err by 10 % on it.
    runs = [_run("nemo-26.02", 1.0), _run("nemo-26.04", 4.0)]
    result = release_scatter(runs, np.array([2.2, 2.2]))
    assert result is not None
    assert (result.recipes, result.rows) == (1, 2)
    assert result.spread_median == pytest.approx(4.0)
    assert result.far_ratio == 1.0
    assert result.one_number_p90_ape == pytest.approx(0.95)
    assert result.means_p90_ape == pytest.approx(0.10)
    # 1.2 and 0.45, the share 0.9 of the way between.
    assert result.p90_ape == pytest.approx(0.45 + 0.9 * 0.75)
