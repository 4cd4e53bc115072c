"""The stored fine-tuning runs of one H200, inside bounds wider than what is found."""

import numpy as np
import pytest

from tests.benchmarks.lora_trials import held_out_errors, is_right, judge, read_runs

RUNS = read_runs()
JUDGED = [judge(row) for row in RUNS if row["kind"] == "trial"]


def test_static_memory_and_peaks_are_near_what_was_measured() -> None:
    described = [one for one in JUDGED if not one.skipped]
    assert len(described) >= 45
    assert max(abs(one.static) for one in described) < 0.01
    assert max(abs(one.peak) for one in described) < 0.05


def test_most_runs_under_a_limit_end_as_predicted() -> None:
    limited = [row for row in RUNS if row["kind"] == "fit"]
    assert len(limited) == 84
    assert sum(map(is_right, limited)) / len(limited) >= 0.9


@pytest.mark.parametrize("fit_on_dense", [True, False])
def test_one_factor_carries_seconds_from_one_kind_of_model_to_the_other(fit_on_dense: bool) -> None:
    factor, errors = held_out_errors(JUDGED, fit_on_dense=fit_on_dense)
    assert 0.8 < factor < 1.3
    assert len(errors) > 15
    assert float(np.median(errors)) < 0.12
