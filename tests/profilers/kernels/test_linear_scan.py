"""Linear attention in chunks, and of one new token, against its recurrence, token by token."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from profilers.interpolation import fit_rows
from profilers.kernels import index_scores
from profilers.kernels.index_scores import chosen
from profilers.kernels.linear_scan import (
    DECAY_SHIFT,
    GATED_DELTA,
    KDA,
    MAMBA2,
    cases,
    prepare,
    scan,
)
from profilers.kernels.linear_update import update
from profilers.records import AXES, Case, Measurement
from profilers.series import key_of
from tests.benchmarks import token_mixers
from tests.expect import present
from tests.rows import each_row

PROFILES = Path(__file__).parents[3] / "examples" / "profiles"


def recurrence(
    kind: str, q: Tensor, k: Tensor, v: Tensor, decays: Tensor, writes: Tensor | None
) -> Tensor:
    """What a chunked scan has to equal: the state of every token, in double precision."""
    repeats = v.shape[2] // q.shape[2]
    q, k = (one.repeat_interleave(repeats, 2).double() for one in (q, k))
    v, steps = v.double(), functional.softplus(decays.double() - DECAY_SHIFT)
    if writes is None:
        v = v * steps.unsqueeze(-1)
    else:
        k = functional.normalize(k, dim=-1)
        q = functional.normalize(q, dim=-1) * q.shape[-1] ** -0.5
        writes = writes.double().sigmoid()
    state = torch.zeros(*v.shape[:1], v.shape[2], k.shape[-1], v.shape[-1], dtype=torch.double)
    outputs = []
    for token in range(v.shape[1]):
        kept = (-steps[:, token]).exp()
        state = state * (kept.unsqueeze(-1) if kind == KDA else kept[..., None, None])
        change = v[:, token]
        if writes is not None:
            found = torch.einsum("bhn,bhnp->bhp", k[:, token], state)
            change = writes[:, token].unsqueeze(-1) * (change - found)
        state = state + torch.einsum("bhn,bhp->bhnp", k[:, token], change)
        outputs.append(torch.einsum("bhn,bhnp->bhp", q[:, token], state))
    return torch.stack(outputs, dim=1)


def test_chunks_equal_the_recurrence() -> None:
    torch.manual_seed(0)
    failures = []
    for kind in (MAMBA2, GATED_DELTA, KDA):
        for length, chunk in ((37, 8), (16, 16), (5, 64), (1, 4)):
            q, k = torch.randn(2, length, 2, 8), torch.randn(2, length, 2, 8)
            v = torch.randn(2, length, 4, 6)
            decays = torch.randn(2, length, 4, 8) if kind == KDA else torch.randn(2, length, 4)
            writes = None if kind == MAMBA2 else torch.randn(2, length, 4)
            found = scan(kind, q, k, v, decays, writes, chunk=chunk).double()
            wanted = recurrence(kind, q, k, v, decays, writes)
            if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
                failures.append(f"{kind}, {length} tokens in chunks of {chunk}")
    assert not failures


def test_states_written_token_by_token_give_what_chunks_give() -> None:
    torch.manual_seed(0)
    for kind in (MAMBA2, GATED_DELTA, KDA):
        q, k, v = torch.randn(2, 7, 2, 8), torch.randn(2, 7, 2, 8), torch.randn(2, 7, 4, 6)
        decays = torch.randn(2, 7, 4, 8) if kind == KDA else torch.randn(2, 7, 4)
        operands = [q, k, v, decays, *([] if kind == MAMBA2 else [torch.randn(2, 7, 4)])]
        state = torch.zeros(2, 4, 8, 6)
        found = torch.cat(
            [update(kind, state, *(one[:, [token]] for one in operands)) for token in range(7)],
            dim=1,
        )
        assert torch.allclose(found, scan(kind, *operands, chunk=4), rtol=1e-4, atol=1e-5), kind


@each_row("kind", (MAMBA2, GATED_DELTA, KDA))
def test_a_case_runs_both_ways_on_a_processor(kind: Any) -> None:
    axes = {"batch": 2, "sequence": 32, "heads": 4, "key_heads": 2, "key_dim": 8, "value_dim": 8}
    case = Case(
        operation="linear_scan",
        kind=kind,
        dtype="bf16",
        direction="forward",
        axes={**axes, "chunk": 16},
    )
    prepared = prepare(case, torch.device("cpu"))
    prepared.forward()
    gradients = cast("tuple[torch.Tensor, ...]", present(prepared.backward)()())
    # Of queries, keys, values and decays, and of writes by a delta rule.
    assert [bool(tensor.isfinite().all() and tensor.any()) for tensor in gradients] == [True] * (
        4 + (kind != MAMBA2)
    )


def test_the_default_grid_asks_a_processor_for_none() -> None:
    assert cases(torch.device("cpu"), ("bf16", "fp32")) == ()


def test_what_one_h200_took_is_interpolated() -> None:
    """Three sizes of the kernels of mamba_ssm and flash-linear-attention predict the others."""
    lines = (PROFILES / "h200-linear-scan" / "linear_scan.jsonl").read_text().splitlines()
    rows = [Measurement.model_validate_json(line) for line in lines]
    tokens = {2048, 8192, 32768}
    known = [row for row in rows if num_tokens(row) in tokens and row.case.axes["batch"] in (1, 4)]
    others = [row for row in rows if row not in known]
    curves = fit_rows(known)
    assert len(others) == 17
    for row in others:
        axes = np.array([[row.case.axes[axis] for axis in AXES["linear_scan"]]], dtype=float)
        seconds_N, _ = curves[key_of(row.case)[0]].predict(axes)
        assert seconds_N[0] == pytest.approx(np.median(row.times_s), rel=0.06), row.case.id


@each_row(("table", "num_series"), (("linear_scan", 6), ("linear_update", 3), ("index_scores", 1)))
def test_what_a_processor_took_is_interpolated(table: str, num_series: int) -> None:
    """PyTorch's kernels: four to thirteen sizes of each kind and direction predict at least six."""
    errors = dict(token_mixers.held_out_errors(token_mixers.stored(table)))
    assert len(errors) == num_series
    for series, errors_N in errors.items():
        assert len(errors_N) >= 6, series
        assert np.median(np.abs(errors_N)) < token_mixers.BOUND, series


def num_tokens(row: Measurement) -> int:
    return row.case.axes["batch"] * row.case.axes["sequence"]


# An indexer's choice in blocks of queries against one query after the other.


@each_row("block", (1, 2 * 2 * 3 * 12, 2**20))
def test_blocks_choose_what_every_query_would_by_itself(
    monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    # Blocks of one, two and all queries.
    monkeypatch.setattr(index_scores, "BLOCK", block)
    # A prompt, one new token, a chunk of a prompt, and entries that merge four tokens each.
    for length, past in ((12, 12), (1, 12), (5, 12), (12, 3)):
        torch.manual_seed(0)
        queries, weights = torch.randn(2, length, 3, 8), torch.randn(2, length, 3)
        keys = torch.randn(2, past, 8)
        found = [
            indices[:, place]
            for indices in chosen(queries, weights, keys, top_k=4)
            for place in range(indices.shape[1])
        ]
        assert len(found) == length
        for query, picked in enumerate(found):
            seen = past - length + query + 1 if past >= length else query // 4 + 1
            products = torch.einsum("bhd,bkd->bhk", queries[:, query], keys[:, :seen])
            scores = torch.einsum("bh,bhk->bk", weights[:, query], products.relu())
            # Keys that no head looks at score 0 alike, in any order.
            wanted = scores.topk(min(4, seen)).values
            reached = scores.gather(1, picked[:, : wanted.shape[1]])
            assert torch.allclose(reached, wanted, atol=1e-5), (length, past, query)
