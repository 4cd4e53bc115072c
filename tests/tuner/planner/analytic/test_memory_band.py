import pytest

from tuner.costs.analytic.constants import Software
from tuner.planner.analytic.memory_band import peak_band

MEGATRON = Software.MEGATRON_2025
TORCH = Software.TORCH_FSDP


def test_a_peak_is_expected_between_its_largest_errors() -> None:
    # 88 of 100: between 78.57 and 100.
    assert peak_band(88.0, software=MEGATRON, pipeline=1) == pytest.approx((88.0 / 1.12, 100.0))


@pytest.mark.parametrize("error_ratio", [-0.091, -0.014, -0.004, -0.117])
def test_torchtitans_published_pipelines_lie_inside_their_band(error_ratio: float) -> None:
    low, high = peak_band(100.0, software=TORCH, pipeline=8)
    assert low <= 100.0 / (1.0 + error_ratio) <= high
    assert high == pytest.approx(100.0 / 0.88)


@pytest.mark.parametrize(
    ("software", "pipeline"),
    [(TORCH, 1), (MEGATRON, 1), (MEGATRON, 8), (Software.MEGATRON_2026, 4)],
)
def test_all_others_keep_the_band_of_runs_without_a_pipeline(
    software: Software, pipeline: int
) -> None:
    assert peak_band(88.0, software=software, pipeline=pipeline)[1] == pytest.approx(100.0)
