"""Bytes of one small layer by the table in tuner/costs/reference/memory.py.

bf16, n = 128 tokens, H = 64, A = 4 and G = 2 heads of d = 16, E = 8, k = 2, F = 128:

    attention   n H D + 4 n          16384 + 512
                n H D                16384
                n (A + 2 G) d D      128 * 8 * 16 * 2 = 32768
                n (A d D + 4 A)      128 * (128 + 16) = 18432
    before FFN  2 n H D + 4 n        32768 + 512; the norm's output is the router's input
    router      4 n (E + k + 1)      128 * 44 = 5632
                8 n k                2048
    experts     M (H D + 8)          256 * 136 = 34816
                2 M                  512
                R (H + 3 F) D        256 * 448 * 2 = 229376
"""

from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.steps.config import Recompute
from tests.rows import each_row
from tuner.costs.reference.memory import (
    LayerActivations,
    chunk_bytes,
    head_saved,
    layer_activations,
    most_chunk_copies,
    token_ids_bytes,
    unit_state,
)
from tuner.costs.reference.update import Unit, layer_units
from tuner.costs.reference.workload import StepDegrees, Workload

Make = Callable[..., Workload]
Cut = Callable[..., StepDegrees]

INPUT = 16384
ATTENTION = 16384 + 512 + 16384 + 32768 + 18432
BEFORE_FFN = 32768 + 512
IDS = 2048
ROUTER = 5632 + IDS
OUTSIDE = ATTENTION + BEFORE_FFN + ROUTER
SCALED_WEIGHTS = 4 * 128 * 2
EXPERTS = 34816 + 512 + 229376


def _counted(
    work: Workload, degrees: StepDegrees, level: Recompute, chunks: int
) -> LayerActivations:
    return layer_activations(work, degrees, layer=0, recompute=level, chunks=chunks)


def test_without_recomputation_everything_is_kept(tiny_work: Make, cut: Cut) -> None:
    actual = _counted(tiny_work(layers="m"), cut(), Recompute.NONE, 1)
    assert actual == LayerActivations(saved=OUTSIDE + EXPERTS, transient=0)


@each_row("chunks", [1, 2, 4, 8])
def test_selective_recomputation_holds_one_chunk_of_the_experts(
    tiny_work: Make, cut: Cut, chunks: int
) -> None:
    actual = _counted(tiny_work(layers="m"), cut(), Recompute.SELECTIVE, chunks)
    assert actual.saved == OUTSIDE + SCALED_WEIGHTS
    assert actual.transient == EXPERTS // chunks


@each_row("chunks", [2, 4, 8])
def test_full_recomputation_keeps_the_input_and_the_routes(
    tiny_work: Make, cut: Cut, chunks: int
) -> None:
    actual = _counted(tiny_work(layers="m"), cut(), Recompute.FULL, chunks)
    assert actual.saved == INPUT + IDS
    assert actual.saved + actual.transient == OUTSIDE + SCALED_WEIGHTS + EXPERTS // chunks


def test_full_recomputation_in_one_chunk_recomputes_the_plain_layer(
    tiny_work: Make, cut: Cut
) -> None:
    full = _counted(tiny_work(layers="m"), cut(), Recompute.FULL, 1)
    none = _counted(tiny_work(layers="m"), cut(), Recompute.NONE, 1)
    assert full.saved + full.transient == none.saved


def test_a_shared_expert_is_released_before_the_experts_are_recomputed(
    tiny_work: Make, cut: Cut
) -> None:
    # Width 32: 3 * 32 activations of each of 128 tokens, 2 bytes each; its input is kept anyway.
    shared = 128 * 3 * 32 * 2
    work = tiny_work(layers="m", moe={"shared_ffn_size": 32})
    selective = _counted(work, cut(), Recompute.SELECTIVE, 1)
    assert selective.saved == OUTSIDE + SCALED_WEIGHTS + shared
    assert selective.transient == EXPERTS - shared
    # In one chunk of a fully recomputed layer both are built before either is released.
    full = _counted(work, cut(), Recompute.FULL, 1)
    assert full.saved + full.transient == OUTSIDE + shared + EXPERTS
    chunked = _counted(work, cut(), Recompute.FULL, 2)
    assert chunked.saved + chunked.transient == OUTSIDE + SCALED_WEIGHTS + EXPERTS // 2


def test_in_fp32_the_router_weights_need_no_cast_copy(tiny_work: Make, cut: Cut) -> None:
    work = tiny_work(layers="m", batch={"precision": "fp32"})
    actual = _counted(work, cut(), Recompute.SELECTIVE, 1)
    # M (H 4 + 8) + R (H + 3 F) 4, and no 2 M.
    assert actual.transient == 256 * (4 * 64 + 8) + 256 * 448 * 4


def test_ranks_that_re_sort_rows_keep_two_orders(tiny_work: Make, cut: Cut) -> None:
    # Two ranks of 4 experts: 16 R more. Eight ranks of one expert: nothing to sort.
    balanced = _counted(tiny_work(layers="m"), cut(data=2, expert=2), Recompute.NONE, 1)
    assert balanced.saved == OUTSIDE + EXPERTS + 16 * 256
    one_each = _counted(tiny_work(layers="m"), cut(data=8, expert=8), Recompute.NONE, 1)
    assert one_each.saved == OUTSIDE + EXPERTS


def test_the_most_loaded_expert_rank_is_counted_unless_one_is_named(
    tiny_work: Make, cut: Cut
) -> None:
    work = tiny_work(layers="m", batch={"load_ratio": ((0.3, 0.3, 0.1, 0.1, 0.05, 0.05, 0.1, 0),)})
    degrees = cut(data=2, expert=2)
    by_rank = [
        layer_activations(
            work, degrees, layer=0, recompute=Recompute.NONE, chunks=1, expert_rank=rank
        ).saved
        for rank in range(2)
    ]
    assert by_rank[0] > by_rank[1]
    assert _counted(work, degrees, Recompute.NONE, 1).saved == max(by_rank)
    more = sum(work.received(degrees, 0)[0]) - sum(work.received(degrees, 0)[1])
    assert by_rank[0] - by_rank[1] == more * (448 * 2 + 16)


@each_row("chunks", [1, 2, 8])
def test_a_chunk_keeps_its_share_of_the_experts(tiny_work: Make, cut: Cut, chunks: int) -> None:
    assert chunk_bytes(tiny_work(layers="m"), cut(), layer=0, chunks=chunks) == EXPERTS // chunks


def test_as_many_copies_fit_as_their_bytes_allow(tiny_work: Make, cut: Cut) -> None:
    # A copy sent keeps 64 * 2 + 8 + 2 bytes, a copy received (64 + 3 * 128) * 2.
    work, one_copy = tiny_work(layers="m"), 138 + 896
    assert most_chunk_copies(work, cut(), free_bytes=10 * one_copy) == 10
    assert most_chunk_copies(work, cut(), free_bytes=10 * one_copy - 1) == 9
    assert most_chunk_copies(work, cut(), free_bytes=one_copy - 1) == 0
    assert most_chunk_copies(work, cut(), free_bytes=-5) == 0
    # Ranks that sort rows again keep two orders of 8 bytes; fp32 has no cast weight.
    assert most_chunk_copies(work, cut(data=2, expert=2), free_bytes=10 * (one_copy + 16)) == 10
    wide = tiny_work(layers="m", batch={"precision": "fp32"})
    assert most_chunk_copies(wide, cut(), free_bytes=10 * (264 + 1792)) == 10


@each_row("chunks", [1, 2, 4, 8])
def test_a_balanced_chunk_is_as_many_copies_as_fit_into_its_bytes(
    tiny_work: Make, cut: Cut, chunks: int
) -> None:
    work, degrees = tiny_work(layers="m"), cut(data=2, expert=2)
    one_chunk = chunk_bytes(work, degrees, layer=0, chunks=chunks)
    assert most_chunk_copies(work, degrees, free_bytes=one_chunk) == 256 // chunks


def test_a_dense_layer_by_hand(tiny_work: Make, cut: Cut) -> None:
    # Feed-forward of width 96: n (H + 3 * 96) D on top of attention and norm.
    work = tiny_work(layers="dm")
    # Its norm keeps input and scale; the output is the network's input.
    norm, network = 16384 + 512, 128 * (64 + 288) * 2
    kept = _counted(work, cut(), Recompute.NONE, 1)
    assert kept == LayerActivations(saved=ATTENTION + norm + network, transient=0)
    assert _counted(work, cut(), Recompute.SELECTIVE, 4) == kept
    full = _counted(work, cut(), Recompute.FULL, 1)
    assert (full.saved, full.saved + full.transient) == (INPUT, kept.saved)


def test_embedding_and_head_hold_tokens_and_log_probabilities(tiny_work: Make, cut: Cut) -> None:
    # 8 sequences of 64 ids of 8 bytes; 2 n H D + 4 n + 4 n V with V = 256.
    assert token_ids_bytes(tiny_work(), cut()) == 8 * 64 * 8
    assert token_ids_bytes(tiny_work(), cut(data=2, tensor=2)) == 8 * 64 * 8 // 4
    assert head_saved(tiny_work(), cut()) == 2 * 16384 + 512 + 4 * 128 * 256


@each_row(
    ("zero_stage", "expected"),
    # 1000 parameters over 4 ranks: (parameters, gradients, two moments, bf16 copies).
    [
        (0, (4000, 4000, 8000, 2000)),
        (1, (1000, 4000, 2000, 2000)),
        (2, (1000, 4000, 2000, 2000)),
        (3, (1000, 1000, 2000, 0)),
    ],
)
def test_state_is_sharded_as_far_as_the_stage_says(
    tiny_work: Make, cut: Cut, zero_stage: int, expected: tuple[int, ...]
) -> None:
    units = [Unit(parameters=1000, ranks=4, stride=1)]
    state = unit_state(units, tiny_work(), cut(data=4, zero_stage=zero_stage))
    assert (state.parameters, state.gradients, state.optimizer, state.gathered) == expected
    assert state.total == sum(expected)


def test_twice_the_expert_ranks_halve_the_experts_state(tiny_work: Make, cut: Cut) -> None:
    work = tiny_work(layers="m")
    isolated, shared = (
        unit_state(
            layer_units(work, cut(data=2, expert=e), layer=0)[1:], work, cut(data=2, expert=e)
        )
        for e in (1, 2)
    )
    # 8 experts of 3 * 64 * 128 weights: 4 + 4 + 8 bytes in fp32 and 2 in bf16 of each.
    assert isolated.total == 8 * 3 * 64 * 128 * 18
    assert 2 * shared.total == isolated.total


@given(
    tensor=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 2, 4]),
    shared=st.sampled_from([0, 32, 1024]),
    precision=st.sampled_from(["bf16", "fp32"]),
    draws=st.data(),
)
@settings(deadline=None, max_examples=60)
def test_recomputing_more_keeps_less_and_more_chunks_add_less(
    tiny_work: Make,
    cut: Cut,
    tensor: int,
    data: int,
    shared: int,
    precision: str,
    draws: st.DataObject,
) -> None:
    expert = draws.draw(st.sampled_from([e for e in (1, 2, 4, 8) if tensor * data % e == 0]))
    batch: dict[str, Any] = {"precision": precision}
    work = tiny_work(layers="m", moe={"shared_ffn_size": shared}, batch=batch)
    degrees = cut(tensor=tensor, data=data, expert=expert)
    none, selective, full = (_counted(work, degrees, level, 1) for level in Recompute)
    assert full.saved <= selective.saved <= none.saved
    for level in (Recompute.SELECTIVE, Recompute.FULL):
        transients = [_counted(work, degrees, level, chunks).transient for chunks in (2, 4, 8)]
        assert transients == sorted(transients, reverse=True)
        assert min(transients) >= 0
        assert len({_counted(work, degrees, level, chunks).saved for chunks in (1, 2, 4, 8)}) == 1
