"""Calls of one small layer, their sizes worked out by hand.

hidden 64, 4 query and 2 key-value heads of 16, 8 experts of width 128, top-2, sequences of 64
tokens in bf16, micro-batches of 2 sequences: n = 128 tokens of 128 bytes each.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.rows import each_row
from tuner.costs.reference.operations import (
    boundary_ops,
    embedding_ops,
    head_ops,
    layer_ops,
)
from tuner.costs.reference.workload import StepDegrees, Workload
from tuner.prices.ops import Op

Make = Callable[..., Workload]
Cut = Callable[..., StepDegrees]


def _ids(ops: Iterable[Op], operation: str, *, in_backward: bool = False) -> list[str]:
    """The sizes of an operation in one pass, in order."""
    return [
        op.case().id for op in ops if op.operation == operation and op.in_backward is in_backward
    ]


def test_one_device_runs_the_gemms_of_the_layer(tiny_work: Make, cut: Cut) -> None:
    outside, inside = layer_ops(tiny_work(layers="m"), cut(), layer=0, chunks=1)
    # qkv: (4 + 2 * 2) * 16 = 128 outputs; output: 4 * 16 = 64 inputs; router: 8 outputs.
    assert _ids(outside, "gemm") == [
        "gemm/bf16/forward/m128-n128-k64",
        "gemm/bf16/forward/m128-n64-k64",
        "gemm/bf16/forward/m128-n8-k64",
    ]
    assert _ids(outside, "attention") == [
        "attention/bf16/forward/batch2-sequence64-heads4-kv_heads2-head_dim16"
    ]
    # 128 * 2 copies, balanced: 32 for each of the 8 experts.
    assert _ids(inside, "grouped_gemm") == [
        "grouped_gemm/bf16/forward/experts8-tokens256-largest32-hidden64-ffn128"
    ]
    assert _ids(inside, "memory_bound") == [
        "memory_bound/permute/bf16/forward/rows256-width64",
        "memory_bound/unpermute/bf16/forward/rows256-width64",
    ]
    assert _ids([*outside, *inside], "collective") == []


def test_every_product_also_runs_backward(tiny_work: Make, cut: Cut) -> None:
    for part in layer_ops(tiny_work(layers="m"), cut(), layer=0, chunks=1):
        for there, back in zip(part[::2], part[1::2], strict=True):
            assert (there.in_backward, back.in_backward) == (False, True)
            assert back.case() == replace(there, direction="backward").case()


def test_tensor_ranks_share_heads_and_gather_the_sequence(tiny_work: Make, cut: Cut) -> None:
    work, degrees = tiny_work(layers="m"), cut(tensor=2)
    outside, _ = layer_ops(work, degrees, layer=0, chunks=1)
    # Products see all 128 tokens and half of the heads; the router sees its own 64 tokens.
    assert _ids(outside, "gemm") == [
        "gemm/bf16/forward/m128-n64-k64",
        "gemm/bf16/forward/m128-n64-k32",
        "gemm/bf16/forward/m64-n8-k64",
    ]
    # 128 tokens * 64 * 2 bytes = 16384: gathered before qkv, scattered after the output product.
    shape = "bytes16384-ranks2-stride1-world2"
    gather, scatter = (f"collective/{kind}/{shape}" for kind in ("all_gather", "reduce_scatter"))
    assert _ids(outside, "collective") == [gather, scatter]
    assert _ids(outside, "collective", in_backward=True) == [scatter, gather]
    # Both lay rows out anew, forward and backward: 2 * 2 copies of what is exchanged.
    for in_backward in (False, True):
        assert _ids(outside, "copy", in_backward=in_backward) == ["copy/device/bytes16384"] * 2


def test_expert_ranks_send_counts_and_rows(tiny_work: Make, cut: Cut) -> None:
    work, degrees = tiny_work(layers="m"), cut(data=2, expert=2)
    _, inside = layer_ops(work, degrees, layer=0, chunks=1)
    # Two ranks of 256 copies each hold 4 experts each: 512 / 2 = 256 rows arrive.
    assert _ids(inside, "grouped_gemm") == [
        "grouped_gemm/bf16/forward/experts4-tokens256-largest64-hidden64-ffn128"
    ]
    # 8 counts of 8 bytes once; 256 rows * 64 * 2 bytes there and back.
    counts = "collective/all_to_all/bytes64-ranks2-stride1-world2"
    rows = "collective/all_to_all/bytes32768-ranks2-stride1-world2"
    assert _ids(inside, "collective") == [counts, rows, rows]
    assert _ids(inside, "collective", in_backward=True) == [rows, rows]
    permutes = [name for name in _ids(inside, "memory_bound") if "/permute/" in name]
    assert len(permutes) == 3  # into copies, then by expert and back by source


def test_the_most_loaded_rank_is_priced(tiny_work: Make, cut: Cut) -> None:
    # Expert 0 gets 40 % of 128 copies a sequence: 51; all others 60 / 7 % each: 11.
    load = ((0.4, *(0.6 / 7,) * 7),)
    work = tiny_work(layers="m", batch={"load_ratio": load})
    _, inside = layer_ops(work, cut(data=2, expert=2), layer=0, chunks=1)
    received = work.received(cut(data=2, expert=2), 0)
    # Two ranks of two sequences each: rank 0 holds experts 0 to 3, four sequences' copies of them.
    assert received[0] == tuple(4 * count for count in work.copies_LE[0][:4])
    network = next(op for op in inside if op.operation == "grouped_gemm")
    assert network.axes["tokens"] == sum(received[0]) > sum(received[1])
    assert network.axes["largest"] == received[0][0] == 4 * 51


def test_stages_send_what_a_micro_batch_holds_between_layers(tiny_work: Make, cut: Cut) -> None:
    assert boundary_ops(tiny_work(), cut()) == ()
    there, back = boundary_ops(tiny_work(), cut(pipeline=2, data=2, tensor=1))
    # 128 tokens * 64 * 2 bytes to the rank two further on.
    assert there.case().id == "collective/send_recv/bytes16384-ranks2-stride2-world4"
    assert back.case() == there.case()
    assert back.in_backward


def test_embedding_and_head_embed_and_predict_tokens(tiny_work: Make, cut: Cut) -> None:
    assert _ids(embedding_ops(tiny_work(), cut()), "memory_bound") == [
        "memory_bound/embedding/bf16/forward/rows128-width64"
    ]
    head = head_ops(tiny_work(), cut())
    assert _ids(head, "gemm") == ["gemm/bf16/forward/m128-n256-k64"]
    assert _ids(head, "memory_bound")[-1] == (
        "memory_bound/cross_entropy/fp32/forward/rows128-width256"
    )


def test_a_dense_layer_has_nothing_to_chunk(tiny_work: Make, cut: Cut) -> None:
    outside, inside = layer_ops(tiny_work(layers="dm"), cut(), layer=0, chunks=1)
    assert inside == ()
    # SwiGLU of width 96: gate and up together, then down.
    assert _ids(outside, "gemm")[-2:] == [
        "gemm/bf16/forward/m128-n192-k64",
        "gemm/bf16/forward/m128-n64-k96",
    ]


def test_a_shared_expert_is_a_dense_network_beside_the_router(tiny_work: Make, cut: Cut) -> None:
    outside, _ = layer_ops(
        tiny_work(layers="m", moe={"shared_ffn_size": 32}), cut(), layer=0, chunks=1
    )
    assert [name for name in _ids(outside, "gemm") if "n64-k32" in name or "n64-k64" in name] == [
        "gemm/bf16/forward/m128-n64-k64",
        "gemm/bf16/forward/m128-n64-k64",
        "gemm/bf16/forward/m128-n64-k32",
    ]


@each_row("chunks", [1, 2, 4, 8])
def test_chunks_divide_the_rows_and_multiply_the_calls(
    tiny_work: Make, cut: Cut, chunks: int
) -> None:
    _, inside = layer_ops(tiny_work(layers="m"), cut(), layer=0, chunks=chunks)
    assert {op.count for op in inside} == {chunks}
    assert {op.axes["tokens"] for op in inside if op.operation == "grouped_gemm"} == {256 // chunks}
    # More than one chunk: each adds its 3 * 8 * 128 * 64 weight gradients to those of the others.
    additions = [op for op in inside if op.kind == "residual_add"]
    assert len(additions) == (chunks > 1)
    for op in additions:
        assert op.in_backward
        assert op.axes["rows"] * op.axes["width"] == 3 * 8 * 128 * 64


@given(
    tensor=st.sampled_from([1, 2]),
    data=st.sampled_from([1, 2, 4]),
    chunks=st.sampled_from([1, 2, 4, 8]),
    skew=st.lists(st.floats(0.01, 1.0), min_size=8, max_size=8),
    data_=st.data(),
)
@settings(deadline=None, max_examples=50)
def test_most_loaded_rows_are_at_least_the_mean_and_no_row_is_lost(
    tiny_work: Make,
    cut: Cut,
    tensor: int,
    data: int,
    chunks: int,
    skew: list[float],
    data_: st.DataObject,
) -> None:
    expert = data_.draw(st.sampled_from([e for e in (1, 2, 4, 8) if tensor * data % e == 0]))
    total = sum(skew)
    work = tiny_work(layers="m", batch={"load_ratio": (tuple(share / total for share in skew),)})
    degrees = cut(tensor=tensor, data=data, expert=expert)
    received = work.received(degrees, 0)
    # Every sequence sends 64 * 2 copies; the group holds expert / tensor ranks' sequences.
    sent = 2 * expert * 128 / tensor
    assert sum(map(sum, received)) == pytest.approx(sent, abs=8)
    _, inside = layer_ops(work, degrees, layer=0, chunks=chunks)
    (rows,) = {op.axes["tokens"] * chunks for op in inside if op.operation == "grouped_gemm"}
    assert rows >= max(map(sum, received)) >= sum(map(sum, received)) / expert
