"""Two configurations are distinguished by the band of their ratio, not of either time."""

import pytest

from tests.expect import present
from tuner.config.train import TrainDecision
from tuner.costs.train.calibration import Residuals, shipped
from tuner.costs.train.ratio_bands import RatioBand, RatioBands
from tuner.search.ratios import (
    Ratios,
    has_same_kernels,
    is_tie,
    ratios_for,
    turned,
    uniform_ratios,
    widest,
)

SINGLE = (0.5, 2.0)
RATIOS = Ratios(same_kernels=(0.96, 1.05), other_kernels=(0.86, 1.16))


def _decision(**changes: object) -> TrainDecision:
    plain = {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 1,
        "context_parallel_size": 1,
        "data_parallel_size": 4,
        "expert_model_parallel_size": 4,
        "expert_tensor_parallel_size": 1,
        "expert_data_parallel_size": 2,
        "sequence_parallel": True,
        "micro_batch_size": 1,
        "zero_stage": 1,
        "dispatcher": "alltoall",
        "a2a_overlap": False,
        "recompute": "none",
        "stage_recompute": ("none", "none"),
        "chunks": (1, 1),
        "pipeline_layout": (8, 8),
        "gradient_bytes": 4,
    }
    return TrainDecision.model_validate(plain | changes)


def _residuals(*bands: RatioBand) -> Residuals:
    return Residuals(
        origin="test",
        data_sha256="",
        rows=2,
        groups=2,
        stated_ratio=0.9,
        covered_ratio=None,
        corrections=(),
        bands=(),
        ratios=RatioBands(covered_ratio=None, bands=bands),
    )


def _band(low: float, *, same_kernels: bool, **where: object) -> RatioBand:
    return RatioBand.model_validate(
        {"low": low, "high": 1 / low, "settings": 20, "pairs": 20, "same_kernels": same_kernels}
        | where
    )


def test_another_pipeline_runs_the_same_kernels_and_another_micro_batch_does_not() -> None:
    plain = _decision()
    deeper = _decision(
        pipeline_model_parallel_size=4,
        data_parallel_size=2,
        expert_data_parallel_size=1,
        stage_recompute=("none",) * 4,
        chunks=(1,) * 4,
        pipeline_layout=(4,) * 4,
    )
    assert has_same_kernels(plain, deeper)
    others: tuple[dict[str, object], ...] = (
        {"micro_batch_size": 2},
        {"a2a_overlap": True},
        {"chunks": (1, 2)},
        {"recompute": "selective", "recompute_modules": ("mlp",)},
        {"expert_model_parallel_size": 2, "expert_data_parallel_size": 4},
    )
    assert not [one for one in others if has_same_kernels(plain, _decision(**one))]


def test_the_same_step_ties_or_not_by_what_differs() -> None:
    plain = _decision()
    same = RATIOS.between(plain, _decision(), ratio=1.1)
    other = RATIOS.between(plain, _decision(micro_batch_size=2), ratio=1.1)
    # 1.1 x 0.96 = 1.056 and 1.1 x 0.86 = 0.946
    assert same == pytest.approx((1.056, 1.155))
    assert other == pytest.approx((0.946, 1.276))
    assert not is_tie(same)
    assert is_tie(other)


def test_the_narrowest_band_about_the_pair_is_returned() -> None:
    residuals = _residuals(
        _band(0.8, same_kernels=False),
        _band(0.85, same_kernels=False, generation="hopper", has_experts=True),
        _band(0.95, same_kernels=True),
    )

    def told(generation: str) -> Ratios:
        return ratios_for(residuals, generation=generation, has_experts=True, band=SINGLE)

    assert told("hopper").other_kernels[0] == 0.85
    assert told("ampere").other_kernels[0] == 0.8
    assert told("hopper").same_kernels[0] == 0.95
    assert told("hopper").farthest == pytest.approx(1 / 0.85)


def test_without_pairs_the_band_of_a_single_time_is_used() -> None:
    for residuals in (None, _residuals().model_copy(update={"ratios": None}), _residuals()):
        found = ratios_for(residuals, generation="hopper", has_experts=True, band=SINGLE)
        assert found == uniform_ratios(1.0)


def test_a_pair_in_the_other_direction_is_the_same() -> None:
    plain, other = _decision(), _decision(micro_batch_size=2)
    band = RATIOS.between(plain, other, ratio=1.1)
    assert turned(band, before=1.1, after=1 / 1.1) == pytest.approx((1 / band[1], 1 / band[0]))


def test_heterogeneous_machines_have_the_widest_of_their_bands() -> None:
    both = widest([RATIOS, uniform_ratios(0.02)])
    assert both.other_kernels == RATIOS.other_kernels
    assert both.same_kernels == (0.96, 1.05)
    assert RATIOS.widened(1.1).same_kernels == pytest.approx((0.96 / 1.1, 1.05 * 1.1))


def test_shipped_ratios_are_far_narrower_than_single_times_on_hopper_with_experts() -> None:
    residuals = present(shipped())
    told = ratios_for(residuals, generation="hopper", has_experts=True, band=SINGLE)
    assert told.other_kernels[1] / told.other_kernels[0] < 1.6
    assert told.same_kernels[1] < told.other_kernels[1]
    assert present(present(residuals.ratios).covered_ratio) >= 0.78
