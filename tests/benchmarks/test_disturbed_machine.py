"""The simulated machine, and the gain of the sentinel and of repeated sessions on it."""

import numpy as np
import pytest

from profilers.interpolation import fit_curves
from profilers.noise import sentinel
from profilers.store import read_profile
from tests.benchmarks.disturbed_machine import (
    NEIGHBOURS,
    STORED,
    Disturbed,
    Spells,
    errors,
    some_sizes,
)


def test_work_takes_longer_by_the_factors_of_the_spells_it_meets() -> None:
    always = Disturbed((Spells(1e9, 1.5, 1.0 - 1e-12),), seed=0)
    always.work(2.0)
    assert always.now_s == pytest.approx(3.0)
    half = Disturbed((Spells(0.01, 1.5, 0.5), Spells(0.01, 1.2, 0.5)), seed=0)
    half.work(20.0)
    # Time at full speed does more of the work: the harmonic mean of the speeds 1 and 1 / factor.
    assert half.now_s == pytest.approx(20.0 / (5.0 / 6.0) / (11.0 / 12.0), rel=0.05)


@pytest.mark.parametrize(
    ("machines", "budget_s"), [(1, 12.0), pytest.param(2, 30.0, marks=pytest.mark.slow)]
)
def test_with_an_eye_on_neighbours_sizes_are_predicted_nearer_to_the_undisturbed_truth(
    machines: int, budget_s: float
) -> None:
    curves = fit_curves(read_profile(STORED))
    cases = some_sizes(count=150, seed=1)
    again, once = (
        [
            error
            for seed in range(machines)
            for error in errors(
                curves,
                cases,
                spells=NEIGHBOURS["some"],
                seed=seed,
                budget_s=budget_s,
                is_once=is_once,
            )
        ]
        for is_once in (False, True)
    )
    assert np.median(again) < 0.8 * np.median(once)
    assert np.median(np.abs(again)) < 0.9 * np.median(np.abs(once))


@pytest.mark.slow
def test_memory_bound_kernels_come_out_undisturbed_though_they_suffer_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    curves = fit_curves(read_profile(STORED))
    cases = [case for case in some_sizes(count=400, seed=2) if case.operation == "memory_bound"]

    def bias() -> float:
        spells = (Spells(0.3, 1.5, 0.6),)
        return float(
            np.median(
                errors(curves, cases, spells=spells, seed=3, budget_s=20.0, is_once=False),
            )
        )

    as_it_is = bias()
    monkeypatch.setattr(sentinel, "EXPONENTS", {})
    assert abs(as_it_is) < 0.03 < bias()
