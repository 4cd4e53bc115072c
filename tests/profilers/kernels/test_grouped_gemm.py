from itertools import islice
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.errors import RankError
from profilers.kernels.expert_loads import time_expert_loads
from profilers.kernels.grouped_gemm import cases, prepare, redrawn, row_counts
from profilers.records import Case
from tests.expect import present
from tests.profilers.testing import UnmappedClock
from tests.rows import each_row


def test_loads_by_hand_are_redrawn_with_their_sum() -> None:
    assert row_counts(experts=4, tokens=8, largest=2) == (2, 2, 2, 2)
    assert row_counts(experts=4, tokens=12, largest=5) == (5, 3, 2, 2)
    assert row_counts(experts=3, tokens=5, largest=5) == (5, 0, 0)
    assert row_counts(experts=1, tokens=5, largest=5) == (5,)
    draws = list(islice(redrawn((64, 16, 0, 16)), 20))
    assert len(set(draws)) > 10
    assert all(sum(counts) == 96 and min(counts) >= 0 for counts in draws)


@settings(deadline=None, max_examples=200)
@given(experts=st.integers(1, 40), tokens=st.integers(0, 400), largest=st.integers(0, 400))
def test_loads_sum_up_and_have_their_largest_or_are_refused(
    experts: int, tokens: int, largest: int
) -> None:
    exist = (tokens == largest) if experts == 1 else -(-tokens // experts) <= largest <= tokens
    if not exist:
        with pytest.raises(ValueError, match="rows"):
            row_counts(experts=experts, tokens=tokens, largest=largest)
        return
    counts = row_counts(experts=experts, tokens=tokens, largest=largest)
    assert len(counts) == experts
    assert sum(counts) == tokens
    assert max(counts) == largest == counts[0]


@each_row("device", ["cpu", "cuda"])
def test_every_default_load_exists(device: str) -> None:
    for case in cases(torch.device(device), ("bf16",)):
        axes = case.axes
        counts = row_counts(experts=axes["experts"], tokens=axes["tokens"], largest=axes["largest"])
        assert (sum(counts), max(counts)) == (axes["tokens"], axes["largest"])


def test_ragged_experts_have_outputs_and_gradients() -> None:
    axes = {"experts": 4, "tokens": 64, "largest": 32, "hidden": 16, "ffn": 32}
    case = Case(
        operation="grouped_gemm", kind="ragged", dtype="bf16", direction="forward", axes=axes
    )
    prepared = prepare(case, torch.device("cpu"))
    prepared.forward()
    gradients = cast("tuple[torch.Tensor, ...]", present(prepared.backward)()())
    assert [tuple(one.shape) for one in gradients] == [(64, 16), (4, 64, 16), (4, 16, 32)]


# Expert networks at exact rows.


@each_row("is_gated", (True, False))
def test_every_load_is_timed_several_times(*, is_gated: bool) -> None:
    name, times = time_expert_loads(
        [[8, 0, 3], [0, 0, 0], [64, 64]],
        hidden=16,
        ffn=32,
        is_gated=is_gated,
        budget_s=0.05,
        device_kind="cpu",
        clock=UnmappedClock(),
    )
    assert name == "cpu"
    assert len(times) == 3
    assert all(len(repeats) >= 5 and min(repeats) > 0.0 for repeats in times)


def test_more_rows_take_longer_and_too_many_are_refused() -> None:
    _, (few, many) = time_expert_loads(
        [[16] * 4, [2048] * 4], hidden=64, ffn=128, budget_s=0.2, device_kind="cpu"
    )
    assert sorted(many)[len(many) // 2] > 4.0 * sorted(few)[len(few) // 2]
    with pytest.raises(RankError, match="with an accelerator"):
        time_expert_loads([[40_000]], hidden=4096, ffn=1024, budget_s=1.0, device_kind="cpu")


@each_row(("is_gated", "needed"), ((True, "2.64e"), (False, "1.76e")))
def test_weights_that_do_not_fit_are_refused_before_anything_is_made(
    *, is_gated: bool, needed: str
) -> None:
    # 512 experts of three matrices, or of two without a gate, of 65,536 x 65,536 in fp32.
    with pytest.raises(RankError, match=rf"about {needed}\+13 bytes, .* are free"):
        time_expert_loads(
            [[1] * 512],
            hidden=65_536,
            ffn=65_536,
            is_gated=is_gated,
            budget_s=1.0,
            device_kind="cpu",
        )
