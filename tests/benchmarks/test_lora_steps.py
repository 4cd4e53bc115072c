"""The stored LoRA runs of this kind of processor, inside bounds wider than what is found."""

import numpy as np

from tests.benchmarks import fit_or_not
from tests.benchmarks.lora_steps import (
    FOLDER,
    RUNS,
    TIMED_RUNS,
    Judged,
    held_out,
    judge,
    loop_runs,
    predictor,
    runs,
)


def judged(name: str) -> list[Judged]:
    known = predictor(FOLDER)
    return [judge(run, known.of(run.config)) for run in runs(FOLDER, name)]


def test_activations_and_peaks_of_the_reference_step_are_what_was_metered() -> None:
    stored = judged(RUNS)
    assert len(stored) == 20
    assert max(abs(one.activations) for one in stored) < 0.01
    assert max(abs(one.peak) for one in stored) < 0.05


def test_seconds_of_one_model_follow_from_those_of_the_others() -> None:
    timed = judged(TIMED_RUNS)
    assert len(timed) == 20
    for ranks in (1, 2):
        errors = held_out([one for one in timed if one.ranks == ranks])
        assert float(np.median(np.abs(errors))) < 0.12


def test_static_and_saved_bytes_of_the_fine_tuning_loop_are_what_was_counted() -> None:
    loop = loop_runs(FOLDER)
    assert len(loop) == 18
    assert max(abs(one.peak) for one in loop) < 0.01
    assert max(abs(one.activations) for one in loop) < 0.05


def test_runs_near_a_limit_end_as_predicted() -> None:
    total = 0
    for name in ("fits.jsonl", "fits-seed-5.jsonl"):
        rows = fit_or_not.kept(FOLDER / name)
        assert fit_or_not.is_as_expected(rows), name
        total += len(rows)
    assert total >= 40
