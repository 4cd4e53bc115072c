"""Counts of micro-batches in flight against the schedule that is walked moment by moment."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.costs.reference.workload import StepDegrees
from tuner.costs.train.in_flight import peak_bytes, warmup_in_flight
from tuner.search.reference.schedule import in_flight, moments


def _degrees(ranks: int, chunks: int) -> StepDegrees:
    return StepDegrees(
        tensor=1,
        pipeline=ranks,
        virtual_pipeline=chunks,
        data=1,
        expert=1,
        micro_batch_size=1,
        zero_stage=0,
    )


def _in_flight_after(
    ranks: int, chunks: int, microbatches: int, zero_bubble: float = 0.0
) -> list[list[int]]:
    counts = warmup_in_flight(
        ranks,
        chunks,
        microbatches=np.array([float(microbatches)]),
        zero_bubble=np.array([zero_bubble]),
    )
    return [[int(count) for count in of_chunk[:, 0]] for of_chunk in counts]


@settings(deadline=None, max_examples=80)
@given(
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    chunks=st.integers(1, 3),
    data=st.data(),
)
def test_the_first_backward_finds_what_the_schedule_holds(
    ranks: int, microbatches: int, chunks: int, data: st.DataObject
) -> None:
    # Below as many micro-batches as ranks the reference step runs GPipe, production engines 1F1B.
    microbatches += ranks
    if chunks > 1:
        ranks = max(2, ranks)
        microbatches = ranks * data.draw(st.integers(1, 4))
    degrees = _degrees(ranks, chunks)
    actual = _in_flight_after(ranks, chunks, microbatches)
    for rank in range(ranks):
        first = next(iter(moments(degrees, num_microbatches=microbatches, rank=rank)))
        assert tuple(actual[chunk][rank] for chunk in range(chunks)) == first.resident
    peak = in_flight(degrees, num_microbatches=microbatches)
    for rank in range(ranks):
        assert sum(actual[chunk][rank] for chunk in range(chunks)) == sum(peak[rank::ranks])


@settings(deadline=None, max_examples=80)
@given(
    ranks=st.integers(2, 6),
    chunks=st.integers(1, 4),
    rounds=st.integers(1, 4),
    seed=st.integers(0, 10_000),
)
def test_the_peak_moment_of_unequal_chunks_is_found(
    ranks: int, chunks: int, rounds: int, seed: int
) -> None:
    layers = np.random.default_rng(seed).integers(0, 4, (chunks, ranks)).astype(np.float64)
    actual = peak_bytes(
        layers[None, :, :, None],
        np.ones((1, 1)),
        microbatches=np.array([float(ranks * rounds)]),
        zero_bubble=np.array([0.0]),
    )
    degrees = _degrees(ranks, chunks)
    for rank in range(ranks):
        seen = moments(degrees, num_microbatches=ranks * rounds, rank=rank)
        expected = max(float(np.dot(moment.resident, layers[:, rank])) for moment in seen)
        assert actual[rank, 0] == expected


def test_a_later_moment_can_be_the_peak() -> None:
    # 2 ranks, 2 chunks of 3 and 1 layers, 8 micro-batches: rank 0 holds 3 and 2 of them before its
    # first backward, 3 * 3 + 2 layers, and 4 and 1 before its second, 4 * 3 + 1.
    layers = np.array([[3.0, 3.0], [1.0, 1.0]])[None, :, :, None]
    assert [of_chunk[0] for of_chunk in _in_flight_after(2, 2, 8)] == [3, 2]
    actual = peak_bytes(
        layers, np.ones((1, 1)), microbatches=np.array([8.0]), zero_bubble=np.array([0.0])
    )
    assert actual[0, 0] == 13.0


def test_plain_pipelines_hold_one_less_on_every_rank() -> None:
    assert _in_flight_after(4, 1, 100) == [[4, 3, 2, 1]]
    assert _in_flight_after(4, 1, 2) == [[2, 2, 2, 1]]


def test_zero_bubble_schedules_hold_on_every_rank_what_the_first_one_does() -> None:
    assert _in_flight_after(4, 1, 100, zero_bubble=1.0) == [[4, 4, 4, 4]]
    interleaved = _in_flight_after(4, 2, 100, zero_bubble=1.0)
    assert all(count >= 4 for of_chunk in interleaved for count in of_chunk)
    assert interleaved[0][0] == _in_flight_after(4, 2, 100)[0][0]


def test_columns_are_counted_each_for_itself() -> None:
    counts = warmup_in_flight(
        4, 1, microbatches=np.array([1.0, 3.0, 9.0]), zero_bubble=np.array([0.0, 0.0, 1.0])
    )
    assert counts[0].tolist() == [
        [1.0, 3.0, 4.0],
        [1.0, 3.0, 4.0],
        [1.0, 2.0, 4.0],
        [1.0, 1.0, 4.0],
    ]
