import random
import time
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tuner.simulate.played import idle_s, most_held
from tuner.config.columns import Strategies
from tuner.simulate.pipeline import (
    BACKWARD,
    FORWARD,
    Pipeline,
    bound_s,
    can_simulate,
    passes,
    simulate_step,
)

seconds = st.floats(0.05, 4.0)


@st.composite
def pipelines(draw: st.DrawFn, chunks: int = 1) -> Pipeline:
    devices = draw(st.integers(1, 6))
    stages = devices * chunks
    forward = draw(st.lists(seconds, min_size=stages, max_size=stages))
    backward = draw(st.lists(seconds, min_size=stages, max_size=stages))
    m = draw(st.integers(1, 10)) if chunks == 1 else devices * draw(st.integers(1, 4))
    return Pipeline(
        forward_s_S=tuple(forward),
        backward_s_S=tuple(backward),
        num_devices=devices,
        num_microbatches=m,
        send_s=draw(st.floats(0.0, 0.3)),
    )


def equal(devices: int, microbatches: int, *, chunks: int = 1, weight_s: float = 0.0) -> Pipeline:
    stages = devices * chunks
    return Pipeline(
        forward_s_S=(1.0,) * stages,
        backward_s_S=(2.0,) * stages,
        weight_s_S=(weight_s,) * stages if weight_s else (),
        num_devices=devices,
        num_microbatches=microbatches,
    )


def bound(pipeline: Pipeline) -> float:
    weight = np.array(pipeline.weight_s_S)[:, None] if pipeline.weight_s_S else None
    strategies = Strategies(
        sequence=1.0,
        micro_batch=1.0,
        num_microbatches=float(pipeline.num_microbatches),
        pipeline=float(pipeline.num_devices),
        virtual_pipeline=float(pipeline.stages_per_device),
        zero_bubble=float(bool(pipeline.weight_s_S)),
    )
    found = bound_s(
        np.array(pipeline.forward_s_S)[:, None],
        np.array(pipeline.backward_s_S)[:, None],
        strategies,
        boundary_s=pipeline.send_s,
        weight_s_SC=weight,
    )
    return float(np.asarray(found)[0])


def devices_s(pipeline: Pipeline) -> list[float]:
    pairs = zip(pipeline.forward_s_S, pipeline.backward_s_S, strict=True)
    both = [forward + backward for forward, backward in pairs]
    return [sum(both[d :: pipeline.num_devices]) for d in range(pipeline.num_devices)]


def test_equal_stages_take_m_plus_p_minus_one_slots() -> None:
    for devices, microbatches in ((1, 5), (4, 8), (8, 16), (4, 2)):
        played = simulate_step(equal(devices, microbatches))
        assert played.step_s == pytest.approx(3.0 * (microbatches + devices - 1))
        assert idle_s(equal(devices, microbatches)) == pytest.approx(
            [3.0 * (devices - 1)] * devices
        )


def test_device_d_of_1f1b_holds_p_minus_d_micro_batches() -> None:
    assert most_held(equal(4, 8)) == [4, 3, 2, 1]


def test_interleaving_divides_the_bubble_by_the_chunks() -> None:
    for chunks in (2, 4):
        # 8 micro-batches of 3 s on each of `chunks` stages, bubble 3 x 3 s of one chunk
        played = simulate_step(equal(4, 8, chunks=chunks))
        assert played.step_s == pytest.approx(3.0 * 8 * chunks + 3.0 * 3)
        # Device 0 warms up 2 (p - 1) + (v - 1) p passes and holds one more.
        assert most_held(equal(4, 8, chunks=chunks))[0] == 2 * 3 + (chunks - 1) * 4 + 1


def test_zero_bubble_leaves_forward_plus_backward_minus_weight_per_device() -> None:
    # Passes of 1 s each: (p - 1) (F + B - W) = 3 s in place of 1F1B's 9 s, at its memory.
    played = simulate_step(equal(4, 8, weight_s=1.0))
    assert played.step_s == pytest.approx(3.0 * 8 + 3.0)
    assert max(most_held(equal(4, 8, weight_s=1.0))) == 4


def test_the_last_micro_batches_of_an_uneven_group_are_simulated_too() -> None:
    assert simulate_step(equal(4, 6, chunks=2)).step_s >= 3.0 * 6 * 2 + 3.0 * 3


def test_sending_delays_the_first_and_the_last_micro_batch() -> None:
    one = Pipeline(
        forward_s_S=(1.0, 1.0),
        backward_s_S=(1.0, 1.0),
        num_devices=2,
        num_microbatches=1,
        send_s=0.5,
    )
    assert simulate_step(one).step_s == pytest.approx(4.0 + 2 * 0.5)


@settings(deadline=None, max_examples=60)
@given(pipelines())
def test_nothing_simulated_as_1f1b_beats_the_bound_or_exceeds_the_ceiling(
    pipeline: Pipeline,
) -> None:
    simulated_s = simulate_step(pipeline).step_s
    assert bound(pipeline) <= simulated_s * (1 + 1e-9)
    if pipeline.send_s == 0.0:
        slot_s = max(pipeline.forward_s_S) + max(pipeline.backward_s_S)
        ceiling_s = sum(devices_s(pipeline)) + (pipeline.num_microbatches - 1) * slot_s
        assert simulated_s <= ceiling_s * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(pipelines(chunks=3))
def test_nothing_interleaved_beats_the_bound(pipeline: Pipeline) -> None:
    assert bound(pipeline) <= simulate_step(pipeline).step_s * (1 + 1e-9)


@settings(deadline=None, max_examples=40)
@given(pipelines(), st.floats(0.1, 0.9))
def test_nothing_simulated_as_zero_bubble_beats_the_bound(base: Pipeline, share: float) -> None:
    pipeline = Pipeline(
        forward_s_S=base.forward_s_S,
        backward_s_S=base.backward_s_S,
        weight_s_S=tuple(share * value for value in base.backward_s_S),
        num_devices=base.num_devices,
        num_microbatches=base.num_microbatches,
        send_s=base.send_s,
    )
    assert bound(pipeline) <= simulate_step(pipeline).step_s * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(pipelines(), st.floats(0.3, 4.0))
def test_the_closed_form_holds_where_backward_is_in_proportion_to_forward(
    base: Pipeline, factor: float
) -> None:
    pipeline = Pipeline(
        forward_s_S=base.forward_s_S,
        backward_s_S=tuple(factor * value for value in base.forward_s_S),
        num_devices=base.num_devices,
        num_microbatches=base.num_microbatches,
    )
    own = devices_s(pipeline)
    closed_s = sum(own) + (pipeline.num_microbatches - 1) * max(own)
    assert simulate_step(pipeline).step_s <= closed_s * (1 + 1e-9)


def test_the_bound_is_exact_for_equal_stages() -> None:
    for chunks in (1, 2, 3):
        pipeline = equal(4, 8, chunks=chunks)
        assert bound(pipeline) == pytest.approx(simulate_step(pipeline).step_s)


def test_refuses_what_is_no_pipeline() -> None:
    given_fields: dict[str, object] = {
        "forward_s_S": (1.0,) * 4,
        "backward_s_S": (1.0,) * 4,
        "num_devices": 4,
        "num_microbatches": 2,
    }
    for changes, said in (
        ({"num_devices": 3}, "spread evenly"),
        ({"num_microbatches": 0}, "at least 1"),
        ({"backward_s_S": (1.0,)}, "as many backward"),
    ):
        with pytest.raises(ValueError, match=said):
            Pipeline(**{**given_fields, **changes})  # type: ignore[arg-type] # wrong on purpose


def test_every_cut_has_a_send_of_its_own() -> None:
    base = equal(3, 1)
    unlike = Pipeline(
        forward_s_S=base.forward_s_S,
        backward_s_S=base.backward_s_S,
        num_devices=3,
        num_microbatches=1,
        sends_s=(0.5, 2.0),
    )
    # One micro-batch passes every stage and every cut there and back.
    assert simulate_step(unlike).step_s == pytest.approx(3 * 3.0 + 2 * (0.5 + 2.0))
    with pytest.raises(ValueError, match="3 stages need 2 sends, not 1"):
        Pipeline(
            forward_s_S=base.forward_s_S,
            backward_s_S=base.backward_s_S,
            num_devices=3,
            num_microbatches=1,
            sends_s=(0.5,),
        )


@settings(deadline=None, max_examples=30)
@given(pipeline=pipelines() | pipelines(chunks=2))
def test_passes_are_those_of_the_simulated_step(pipeline: Pipeline) -> None:
    every = passes(pipeline)
    m, stages = pipeline.num_microbatches, len(pipeline.forward_s_S)
    assert len({(one.kind, one.stage, one.microbatch) for one in every}) == 2 * m * stages
    assert max(one.end_s for one in every) == pytest.approx(simulate_step(pipeline).step_s)
    for before, after in pairwise(every):
        if before.device == after.device:
            assert after.start_s >= before.end_s - 1e-9


def test_two_alike_stages_and_two_micro_batches_by_hand() -> None:
    # Device 0: F0 0-1, F1 1-2, waits, B0 4-6, B1 7-9. Device 1: F0 1-2, B0 2-4, F1 4-5, B1 5-7.
    every = {(one.device, one.kind, one.microbatch): one for one in passes(equal(2, 2))}
    times = {key: (one.start_s, one.end_s) for key, one in every.items()}
    assert times == {
        (0, FORWARD, 0): (0.0, 1.0),
        (0, FORWARD, 1): (1.0, 2.0),
        (0, BACKWARD, 0): (4.0, 6.0),
        (0, BACKWARD, 1): (7.0, 9.0),
        (1, FORWARD, 0): (1.0, 2.0),
        (1, BACKWARD, 0): (2.0, 4.0),
        (1, FORWARD, 1): (4.0, 5.0),
        (1, BACKWARD, 1): (5.0, 7.0),
    }


def _varied(rng: random.Random) -> Pipeline:
    """Return a pipeline of some hundred micro-batches, its stages equal, close or unlike."""
    devices, chunks = rng.randint(1, 6), rng.choice((1, 1, 2, 3))
    least, most = rng.choice(((0.05, 4.0), (1.0, 1.02), (1.1, 1.1)))
    is_whole = rng.random() < 0.25

    def second() -> float:
        return float(rng.randint(1, 3)) if is_whole else rng.uniform(least, most)

    forward = tuple(second() for _ in range(devices * chunks))
    backward = tuple(2.0 * second() for _ in forward)
    is_zero_bubble = chunks == 1 and rng.random() < 0.3
    whole_groups = rng.random() < 0.5
    count = rng.randint(300, 700)
    return Pipeline(
        forward_s_S=forward,
        backward_s_S=backward,
        weight_s_S=tuple(0.4 * one for one in backward) if is_zero_bubble else (),
        num_devices=devices,
        num_microbatches=count - count % devices if whole_groups else count,
        send_s=rng.choice((0.0, 0.3, rng.random())),
    )


@pytest.mark.parametrize("count", [30, pytest.param(90, marks=pytest.mark.slow)])
def test_what_is_extrapolated_ends_when_the_whole_schedule_does(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(22)
    exact, bounded = 0, 0
    for _ in range(count):
        pipeline = _varied(rng)
        monkeypatch.setattr("tuner.simulate.pipeline.FEW_PASSES", 10**9)
        try:
            whole = simulate_step(pipeline)
        except ValueError:
            # Groups of unequal size may wait for one another.
            continue
        monkeypatch.setattr("tuner.simulate.pipeline.FEW_PASSES", 100)
        monkeypatch.setattr("tuner.simulate.pipeline.MOST_PASSES", rng.choice((100, 2_000)))
        short = simulate_step(pipeline)
        off_s = abs(short.step_s - whole.step_s)
        exact += short.max_error_s == 0.0
        bounded += short.max_error_s > 0.0
        assert off_s <= short.max_error_s + 1e-12 * whole.step_s, (
            pipeline,
            short.step_s,
            whole.step_s,
        )
        assert short.max_error_s <= 0.05 * whole.step_s, (pipeline, short.max_error_s, whole.step_s)
    assert exact > 5 * bounded > 0


def test_a_step_of_billions_of_micro_batches_is_simulated_in_bounded_time_and_memory() -> None:
    count = 2**31
    tracemalloc.start()
    try:
        for pipeline in (equal(8, count), equal(8, count, chunks=2), equal(1, 10**15)):
            begun_s = time.process_time()
            played = simulate_step(pipeline)
            assert time.process_time() - begun_s < 10.0
            m, p, v = pipeline.num_microbatches, pipeline.num_devices, pipeline.stages_per_device
            assert played.step_s == pytest.approx(3.0 * (m * v + p - 1), rel=1e-12)
            assert played.max_error_s == 0.0
        assert tracemalloc.get_traced_memory()[1] < 300e6
    finally:
        tracemalloc.stop()


def test_a_pipeline_of_thousands_is_said_not_to_be_playable() -> None:
    assert can_simulate(equal(64, 2**31))
    assert can_simulate(equal(1_000, 100))
    assert not can_simulate(equal(1_000, 6_000))
    assert not can_simulate(equal(10_000, 2**31))
