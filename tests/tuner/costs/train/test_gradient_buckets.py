"""Visible gradient reduction by bucket size: by hand, against a replay, and inside a step."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuner.models import example_model
from tuner.config.columns import Numbers, Strategies
from tuner.config.shapes import Hardware
from tuner.costs.train.columns_of import StageLayers, shape_of_model, stages_of_layouts
from tuner.costs.train.gradient_buckets import (
    ReducedGradients,
    bucketed_reduction_s,
    default_bucket,
    visible_s,
)
from tuner.costs.train.step import price_step
from tuner.devices.datasheet import Generation
from tuner.prices.train.constants import GemmPrecision, Software, uncalibrated


def _ring(start_s: float, s_each: float) -> Callable[[Numbers], Numbers]:
    return lambda parameters: start_s + s_each * parameters


def _visible(
    parameters: float, bucket: float, *, start_s: float, backward_s: float, ratio: float = 0.0
) -> float:
    kind = ReducedGradients(parameters=parameters, reduce_s=_ring(start_s, 1.0))
    return float(visible_s((kind,), bucket=bucket, backward_s=backward_s, interference=ratio))


def test_the_engines_own_size_grows_with_the_ranks() -> None:
    assert np.asarray(default_bucket(np.array([8.0, 40.0, 512.0]))).tolist() == [40e6, 40e6, 512e6]


def test_by_hand() -> None:
    # 12 parameters at 1 s each, 0.5 s to start, beside 20 s of backward pass. One bucket starts at
    # its end: 12.5 s. Four of 3 take 3.5 s each: the last one shows, since the 14 s of all fit.
    assert _visible(12.0, 12.0, start_s=0.5, backward_s=20.0) == pytest.approx(12.5)
    assert _visible(12.0, 3.0, start_s=0.5, backward_s=20.0) == pytest.approx(3.5)
    # With 0.4 of the hidden 10.5 s as interference: 3.5 + 4.2.
    assert _visible(12.0, 3.0, start_s=0.5, backward_s=20.0, ratio=0.4) == pytest.approx(7.7)
    # Twelve of 1 beside 6 s take 18 s, of which 6 * 11 / 12 are hidden: 12.5, more than 1.5.
    assert _visible(12.0, 1.0, start_s=0.5, backward_s=6.0) == pytest.approx(12.5)


def test_dense_parameters_and_experts_have_buckets_of_one_size() -> None:
    kinds = (
        ReducedGradients(parameters=12.0, reduce_s=_ring(0.0, 1.0)),
        ReducedGradients(parameters=2.0, reduce_s=_ring(0.0, 2.0)),
    )
    # Buckets of 3: four of 3 s and one of 4 s; at the end one of each is left.
    actual = visible_s(kinds, bucket=3.0, backward_s=100.0, interference=0.0)
    assert float(actual) == pytest.approx(3.0 + 4.0)


@given(
    parameters=st.floats(1e6, 1e10),
    count=st.integers(1, 200),
    start_s=st.floats(0.0, 1e-3),
    s_each=st.floats(1e-12, 1e-9),
    backward_s=st.floats(1e-3, 10.0),
)
@settings(deadline=None, max_examples=200)
def test_a_replay_of_the_buckets_agrees_with_the_formula(
    parameters: float, count: int, start_s: float, s_each: float, backward_s: float
) -> None:
    kind = ReducedGradients(parameters=parameters, reduce_s=_ring(start_s, s_each))
    actual = float(
        visible_s((kind,), bucket=parameters / count, backward_s=backward_s, interference=0.0)
    )
    buckets = int(np.maximum(np.ceil(parameters / (parameters / count)), 1.0))
    end_s, each_s = 0.0, start_s + s_each * parameters / buckets
    for bucket in range(buckets):
        end_s = max(end_s, backward_s * (bucket + 1) / buckets) + each_s
    assert actual == pytest.approx(end_s - backward_s, rel=1e-9, abs=1e-12)


@given(
    bucket=st.floats(1e6, 1e10),
    default=st.floats(1e6, 1e10),
    usual_s=st.floats(0.0, 2.0),
)
@settings(deadline=None, max_examples=200)
def test_a_size_moves_the_fitted_seconds_by_no_more_than_the_formula_says(
    bucket: float, default: float, usual_s: float
) -> None:
    kind = ReducedGradients(parameters=3e9, reduce_s=_ring(1e-4, 1e-10))
    actual = float(
        bucketed_reduction_s(usual_s, (kind,), bucket=bucket, default=default, backward_s=1.0)
    )
    own, other = (
        float(visible_s((kind,), bucket=size, backward_s=1.0)) for size in (bucket, default)
    )
    assert actual >= 0.0
    if own < other:
        assert usual_s - (other - own) <= actual + 1e-12
        assert actual <= usual_s
    else:
        assert actual >= usual_s
    if bucket == default:
        assert actual == usual_s


MACHINE = Hardware(
    matmul_flop_per_s=989e12,
    attention_flop_per_s=989e12,
    compute_units=132.0,
    memory_bytes=80e9,
    memory_bytes_per_s=3.35e12,
    scale_up_bytes_per_s=450e9,
    domain=8.0,
    devices_per_node=8.0,
    scale_out_bytes_per_s=50e9,
)
CONSTANTS = uncalibrated(
    Generation.HOPPER, precision=GemmPrecision.BF16, software=Software.MEGATRON_2025
)


QWEN3 = example_model("qwen3-30b-a3b")


def _step_s(*, data: float, bucket: float, **changes: Numbers) -> float:
    strategies = Strategies(
        **{
            "sequence": 4096.0,
            "micro_batch": 1.0,
            "num_microbatches": 2.0,
            "data": data,
            "expert": 8.0,
            "bucket_parameters": bucket,
            **changes,
        }
    )
    stages = stages_of_layouts(
        QWEN3, [(StageLayers(layers=48, embedding=True, head=True, mtp_layers=0),)]
    )
    step = price_step(shape_of_model(QWEN3, mtp_layers=0), strategies, MACHINE, CONSTANTS, stages)
    return float(np.ravel(step.step_s)[0])


def test_the_engines_own_size_stated_changes_no_price() -> None:
    for data in (8.0, 64.0, 1024.0):
        assert _step_s(data=data, bucket=float(default_bucket(data))) == pytest.approx(
            _step_s(data=data, bucket=0.0), rel=1e-12
        )


def test_smaller_buckets_gain_on_many_ranks_and_tiny_ones_lose() -> None:
    usual = _step_s(data=1024.0, bucket=0.0)
    assert _step_s(data=1024.0, bucket=160e6) < usual * 0.99
    assert _step_s(data=1024.0, bucket=1e5) > usual


def test_a_size_means_nothing_without_overlap_or_with_sharded_parameters() -> None:
    for changes in ({"overlap_gradients": 0.0}, {"zero_stage": 3.0}):
        usual = _step_s(data=1024.0, bucket=0.0, **changes)
        assert _step_s(data=1024.0, bucket=80e6, **changes) == usual


def test_sizes_are_priced_together() -> None:
    sizes = np.array([0.0, 40e6, 160e6])
    stages = stages_of_layouts(
        QWEN3, [(StageLayers(layers=48, embedding=True, head=True, mtp_layers=0),)]
    )
    one = Strategies(
        sequence=4096.0, micro_batch=1.0, num_microbatches=2.0, data=1024.0, expert=8.0
    )
    many = replace(one, bucket_parameters=sizes)
    together = price_step(
        shape_of_model(QWEN3, mtp_layers=0), many, MACHINE, CONSTANTS, stages
    ).step_s
    assert np.ravel(together).tolist() == [_step_s(data=1024.0, bucket=size) for size in sizes]
