import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.costs.analytic.constants import Software
from tuner.planner.analytic.memory_band import above_ratio, peak_band

MEGATRON = Software.MEGATRON_2025
TORCH = Software.TORCH_FSDP


def test_a_share_of_the_band_lies_above_the_limit() -> None:
    # 88 of 100: between 78.57 and 100, so with a limit of 94 six of 21.43 lie above.
    low, high = peak_band(88.0, software=MEGATRON, pipeline=1)
    assert (low, high) == pytest.approx((88.0 / 1.12, 100.0))
    (above,) = above_ratio(
        np.array([88.0]), software=MEGATRON, pipeline_C=np.array([1]), limit_bytes=94.0
    )
    assert above == pytest.approx(6.0 / (100.0 - 88.0 / 1.12))


def test_a_band_below_the_limit_has_nothing_above_it_and_one_beyond_it_has_all() -> None:
    found = above_ratio(np.array([50.0, 200.0]), software=MEGATRON, pipeline_C=1, limit_bytes=100.0)
    assert list(found) == [0.0, 1.0]


@pytest.mark.parametrize("error_ratio", [-0.205, -0.168, -0.130, -0.228])
def test_torchtitans_published_pipelines_lie_inside_their_band(error_ratio: float) -> None:
    low, high = peak_band(100.0, software=TORCH, pipeline=8)
    assert low <= 100.0 / (1.0 + error_ratio) <= high
    assert high == pytest.approx(130.0, abs=0.2)


@pytest.mark.parametrize(
    ("software", "pipeline"),
    [(TORCH, 1), (MEGATRON, 1), (MEGATRON, 8), (Software.MEGATRON_2026, 4)],
)
def test_all_others_keep_the_band_of_runs_without_a_pipeline(
    software: Software, pipeline: int
) -> None:
    assert peak_band(88.0, software=software, pipeline=pipeline)[1] == pytest.approx(100.0)


def test_each_peak_is_judged_by_its_own_pipeline() -> None:
    found = above_ratio(
        np.array([85.0, 85.0, 75.0]),
        software=TORCH,
        pipeline_C=np.array([1, 2, 2]),
        limit_bytes=98.0,
    )
    assert found[0] == 0.0
    assert found[1] > 0.3
    assert found[2] == 0.0


@given(
    st.lists(st.floats(1.0, 1e12), min_size=2, max_size=2).map(sorted),
    st.floats(1.0, 1e12),
    st.sampled_from(list(Software)),
    st.integers(1, 16),
)
@settings(deadline=None, max_examples=60)
def test_a_fuller_device_has_no_less_above(
    peaks: list[float], limit: float, software: Software, pipeline: int
) -> None:
    less, more = above_ratio(
        np.array(peaks), software=software, pipeline_C=pipeline, limit_bytes=limit
    )
    assert 0.0 <= less <= more <= 1.0
