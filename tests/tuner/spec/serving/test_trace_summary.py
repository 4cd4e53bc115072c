"""Summaries: by hand and against closed forms."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.rows import each_row
from tests.tuner.spec.serving.testing import FORMATS, Form
from tuner.errors import SpecError
from tuner.spec.serving import trace_summary, traces
from tuner.spec.serving.trace_summary import TraceSummary, summarise_trace

Write = Callable[[str], Path]


def described(path: Path, seed: int = 0) -> TraceSummary:
    return summarise_trace(path, rng=np.random.default_rng(seed))


def burst(rows: Sequence[tuple[float, int, int]]) -> str:
    header = "Timestamp,Request tokens,Response tokens\n"
    return header + "".join(f"{time_s},{one},{two}\n" for time_s, one, two in rows)


@each_row("form", FORMATS.values())
@each_row("chunk_rows", [2, 1000])
def test_a_trace_by_hand(
    form: Form, write: Write, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    monkeypatch.setattr(traces, "CHUNK_ROWS", chunk_rows)
    rows = [(0.0, 10, 1), (0.25, 20, 2), (0.5, 30, 3), (1.5, 40, 4), (14.5, 50, 5), (15.0, 9, 0)]
    summary = described(write(form(rows)))
    assert (summary.requests, summary.failed) == (5, 1)
    assert summary.span_s == pytest.approx(14.5)
    assert summary.rate_per_s == pytest.approx(4 / 14.5)
    # gaps 0.25, 0.25, 1, 13
    assert summary.gap_cv == pytest.approx(
        np.std([0.25, 0.25, 1, 13]) / np.mean([0.25, 0.25, 1, 13])
    )
    assert summary.gaps == 1
    assert summary.gaps_s == pytest.approx(13.0)
    assert (summary.largest_gap_s, summary.largest_gap_at_s) == pytest.approx((13.0, 1.5))
    # Of windows of 1 s, 14 are whole: 3, 1, then none. 10 s fits once only.
    (window,) = summary.burstiness
    counts = [3, 1, *[0] * 12]
    assert window.peak_ratio == pytest.approx(3 / np.mean(counts))
    assert window.dispersion == pytest.approx(np.var(counts) / np.mean(counts))
    assert summary.input_tokens.mean_tokens == 30.0
    assert summary.output_tokens.quantile_tokens(0.5) == 3
    assert summary.output_tokens.quantile_tokens(0.81) == 5
    assert summary.correlation == pytest.approx(1.0)
    assert sorted(summary.sample_input_N.tolist()) == [10, 20, 30, 40, 50]


def test_poisson_arrivals_have_a_dispersion_of_one_at_every_window(write: Write) -> None:
    rng = np.random.default_rng(5)
    times = np.cumsum(rng.exponential(0.05, size=40_000))
    summary = described(write(burst([(float(time_s), 5, 5) for time_s in times])))
    assert summary.rate_per_s == pytest.approx(20.0, rel=0.02)
    assert summary.gap_cv == pytest.approx(1.0, rel=0.02)
    assert [window.window_s for window in summary.burstiness] == [1.0, 10.0, 60.0]
    for window, tolerance in zip(summary.burstiness, (0.15, 0.35, 0.8), strict=True):
        assert window.dispersion == pytest.approx(1.0, rel=tolerance)
    assert summary.correlation == 0.0


def test_the_sample_of_a_long_trace_is_uniform_and_keeps_pairs(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_summary, "SAMPLE_ROWS", 500)
    monkeypatch.setattr(traces, "CHUNK_ROWS", 300)
    path = write(burst([(0.0, number + 1, number + 2) for number in range(5000)]))
    summary = [described(path, seed) for seed in range(20)]
    for one in summary:
        assert len(set(one.sample_input_N.tolist())) == 500
        assert np.array_equal(one.sample_output_N, one.sample_input_N + 1)
    # 10,000 draws of 1..5000: mean 2500.5, its standard error 1443 / 100
    means = np.mean([one.sample_input_N.mean() for one in summary])
    assert means == pytest.approx(2500.5, abs=5 * 14.4)
    early = np.mean([np.count_nonzero(one.sample_input_N <= 500) for one in summary])
    assert early == pytest.approx(50.0, abs=8.0)


def test_equal_seeds_sample_equal_pairs(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_summary, "SAMPLE_ROWS", 10)
    path = write(burst([(0.0, number + 1, 1) for number in range(100)]))
    one, other = described(path, 3), described(path, 3)
    assert np.array_equal(one.sample_input_N, other.sample_input_N)


def test_a_trace_of_one_request_is_no_load(write: Write) -> None:
    with pytest.raises(SpecError, match="input and output tokens: 1; a load has two"):
        described(write(burst([(0.0, 5, 5), (1.0, 5, 0)])))
