import numpy as np
import pytest

from tests.tuner.models import example_model
from tuner.costs.train.expert_imbalance import expert_imbalances
from tuner.errors import SpecError
from tuner.spec.goal import Phase
from tuner.spec.routing import LoadRatios, RoutingRecord

MIXTRAL = example_model("mixtral-8x7b")
"""32 MoE layers of 8 experts."""


def skewed(share: float) -> tuple[float, ...]:
    """Expert 0 gets `share`, the others the rest evenly."""
    return (share, *[(1.0 - share) / 7.0] * 7)


def record(passes: list[LoadRatios], layer_ids: tuple[int, ...]) -> RoutingRecord:
    mean = np.array(passes).mean(axis=0)
    return RoutingRecord(
        name="r",
        num_experts=8,
        layer_ids=layer_ids,
        load_ratios=tuple(tuple(row) for row in mean.tolist()),
        passes=tuple(passes),
    )


def test_balance_leaves_nobody_busier() -> None:
    ratios = expert_imbalances(MIXTRAL, record([(skewed(0.125),)] * 4, (0,)), Phase.STEADY)
    assert ratios.degrees == (1, 2, 4, 8)
    assert ratios.mean_D == pytest.approx(np.ones(4))
    assert ratios.p99_D == pytest.approx(np.ones(4))


SKEWED = expert_imbalances(MIXTRAL, record([(skewed(0.3),)] * 4, (0,)), Phase.STEADY)


def test_a_hot_expert_weighs_more_the_fewer_share_its_rank() -> None:
    # Alone: 8 * 0.3. With one other of 0.1: 4 * 0.4. With three: 2 * 0.6. All together: 1.
    assert SKEWED.mean_D == pytest.approx([1.0, 1.2, 1.6, 2.4])
    assert SKEWED.of_degree(8) == pytest.approx((2.4, 2.4))


def test_time_takes_the_mean_of_passes_and_buffers_the_worst() -> None:
    calm: LoadRatios = (skewed(0.125),)
    hot: LoadRatios = (skewed(0.5),)
    passes = [calm, calm, calm, hot]
    ratios = expert_imbalances(MIXTRAL, record(passes, (0,)), Phase.STEADY)
    # The second half: ratios 1 and 8 * 0.5.
    assert ratios.of_degree(8) == pytest.approx((2.5, 4.0))
    early = expert_imbalances(MIXTRAL, record(passes, (0,)), Phase.EARLY)
    assert early.of_degree(8) == pytest.approx((1.0, 1.0))


def test_a_layer_that_was_not_recorded_is_like_the_mean_of_the_others() -> None:
    rows: LoadRatios = (skewed(0.125), skewed(0.5))
    ratios = expert_imbalances(MIXTRAL, record([rows] * 2, (2, 20)), Phase.STEADY)
    assert ratios.mean_D[-1] == pytest.approx((1.0 + 4.0) / 2)
    assert ratios.p99_D[-1] == pytest.approx(4.0)


def test_columns_look_degrees_up() -> None:
    mean, p99 = SKEWED.columns(np.array([8, 1, 2]))
    assert mean == pytest.approx([2.4, 1.0, 1.2])
    assert p99 == pytest.approx([2.4, 1.0, 1.2])


def test_totals_without_passes_know_no_spread() -> None:
    totals = RoutingRecord(name="r", num_experts=8, layer_ids=(0,), load_ratios=(skewed(0.3),))
    assert expert_imbalances(MIXTRAL, totals, Phase.STEADY).of_degree(8) == pytest.approx(
        (2.4, 2.4)
    )


def test_a_recording_of_another_model_is_refused() -> None:
    other = RoutingRecord(name="r", num_experts=2, layer_ids=(0,), load_ratios=((0.5, 0.5),))
    with pytest.raises(SpecError, match="recorded with 2 experts, 'mixtral-8x7b' has 8 experts"):
        expert_imbalances(MIXTRAL, other, Phase.STEADY)


def test_a_degree_that_divides_no_experts_is_refused() -> None:
    with pytest.raises(ValueError, match="expert degree 3"):
        SKEWED.of_degree(3)
