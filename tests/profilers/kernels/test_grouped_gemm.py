from itertools import islice
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from profilers.kernels.grouped_gemm import cases, prepare, redrawn, row_counts
from profilers.records import Case
from tests.rows import each_row


def test_an_even_and_an_uneven_load_by_hand() -> None:
    assert row_counts(experts=4, tokens=8, largest=2) == (2, 2, 2, 2)
    assert row_counts(experts=4, tokens=12, largest=5) == (5, 3, 2, 2)
    assert row_counts(experts=3, tokens=5, largest=5) == (5, 0, 0)
    assert row_counts(experts=1, tokens=5, largest=5) == (5,)


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
        row_counts(experts=axes["experts"], tokens=axes["tokens"], largest=axes["largest"])


def test_redrawn_rows_differ_and_keep_their_sum() -> None:
    draws = list(islice(redrawn((64, 16, 0, 16)), 20))
    assert len(set(draws)) > 10
    assert all(sum(counts) == 96 and min(counts) >= 0 for counts in draws)


def test_ragged_experts_have_outputs_and_gradients() -> None:
    axes = {"experts": 4, "tokens": 64, "largest": 32, "hidden": 16, "ffn": 32}
    case = Case(
        operation="grouped_gemm", kind="ragged", dtype="bf16", direction="forward", axes=axes
    )
    prepared = prepare(case, torch.device("cpu"))
    prepared.forward()
    assert prepared.backward is not None
    gradients = cast("tuple[torch.Tensor, ...]", prepared.backward()())
    assert [tuple(one.shape) for one in gradients] == [(64, 16), (4, 64, 16), (4, 16, 32)]
