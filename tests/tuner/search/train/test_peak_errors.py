import math

import numpy as np
import pytest

from tests.rows import each_row
from tuner.prices.train.constants import Software
from tuner.search.train.peak_errors import (
    RATIOS,
    SCATTER,
    ErrorKind,
    PeakErrors,
    error_kind,
    peak_band,
    published_errors,
)


def test_half_of_the_probability_lies_above_a_single_recipe() -> None:
    below, at, above = PeakErrors.of([[(1.1,)]]).at_start(np.array([1.0, 1.1, 1.2]))
    assert at == pytest.approx(0.5, abs=1e-3)
    assert below > 0.98
    assert above < 0.02


def test_the_blur_is_student_with_four_degrees() -> None:
    # Tables: P(T4 > 2.132) = 0.05, P(T4 > 3.747) = 0.01.
    errors = PeakErrors.of([[(1.0,)]])
    room = np.exp(SCATTER * np.array([2.132, 3.747]))
    assert errors.at_start(room) == pytest.approx([0.05, 0.01], abs=5e-4)


def test_a_source_weighs_the_root_of_its_recipes() -> None:
    # Four recipes weigh 2 together, one weighs 1: two thirds above 1 / 1.5 and a third at 1.5.
    errors = PeakErrors.of([[(1.0,), (1.0,), (1.0, 1.0), (1.0,)], [(1.5,)]])
    assert errors.at_start(np.array([0.2, 1.2])) == pytest.approx([1.0, 1 / 3], abs=1e-3)


def test_nothing_to_learn_from_is_refused() -> None:
    with pytest.raises(ValueError, match="no published peak"):
        PeakErrors.of([])


def test_less_headroom_and_more_growth_are_never_less_likely_to_run_out() -> None:
    room = np.geomspace(0.3, 3.0, 200)
    for kind in ErrorKind:
        errors = published_errors(kind)
        start = errors.at_start(room)
        assert (np.diff(start) <= 1e-12).all(), kind
        assert ((start >= 0.0) & (start <= 1.0)).all(), kind
        before = start
        for growth in (0.0, 0.01, 0.05):
            ever = errors.ever(room, growth_C=np.full_like(room, growth))
            assert (ever >= before - 1e-12).all(), (kind, growth)
            before = ever


def test_each_kind_keeps_its_own_centre() -> None:
    """Half of the probability lies above: Megatron near 1, torchtitan's pipelines above."""

    def median(kind: ErrorKind) -> float:
        room = np.geomspace(0.8, 1.6, 2000)
        return float(room[np.argmin(np.abs(published_errors(kind).at_start(room) - 0.5))])

    assert 0.99 < median(ErrorKind.MEGATRON) < 1.01
    assert 1.02 < median(ErrorKind.PYTORCH) < 1.07
    assert 1.03 < median(ErrorKind.PYTORCH_PIPELINE) < 1.1


def test_only_pytorchs_pipelines_are_a_kind_of_their_own() -> None:
    kinds = {
        (software, has): error_kind(software, has_pipeline=has)
        for software in Software
        for has in (False, True)
    }
    assert kinds[Software.TORCH_FSDP, True] is ErrorKind.PYTORCH_PIPELINE
    assert kinds[Software.TORCH_FSDP, False] is ErrorKind.PYTORCH
    assert kinds[Software.TRANSFORMERS, False] is ErrorKind.PYTORCH
    of_pytorch = (Software.TORCH_FSDP, Software.TORCH_EAGER, Software.TRANSFORMERS)
    others = {kind for (software, _), kind in kinds.items() if software not in of_pytorch}
    assert others == {ErrorKind.MEGATRON}


def test_every_published_ratio_is_near_one() -> None:
    every = [r for sources in RATIOS.values() for s in sources.values() for one in s for r in one]
    assert len(every) == 50
    assert max(abs(math.log(ratio)) for ratio in every) < 0.27


def test_a_peak_is_expected_between_the_largest_errors() -> None:
    # 88 of 100: between 78.57 and 100.
    assert peak_band(88.0) == pytest.approx((88.0 / 1.12, 100.0))


@each_row("error_ratio", [-0.091, -0.014, -0.004, -0.117, -0.087, -0.060, 0.024])
def test_published_peaks_lie_inside_the_band(error_ratio: float) -> None:
    low, high = peak_band(100.0)
    assert low <= 100.0 / (1.0 + error_ratio) <= high
