"""Summary of the public Azure code trace, against figures computed independently."""

from pathlib import Path

import numpy as np
import pytest

from tuner.spec.serving.trace_summary import summarise_trace

PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "traces"


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="the public Azure traces are not beside this tree")
def test_the_figures_of_the_public_code_trace_are_reproduced() -> None:
    summary = summarise_trace(PUBLIC / "azure_llm_2023_code.csv", rng=np.random.default_rng(0))
    # Figures of the whole file, computed independently of this reader.
    assert (summary.requests, summary.failed) == (8819, 0)
    assert summary.span_s == pytest.approx(3436, abs=1)
    assert summary.rate_per_s == pytest.approx(2.57, abs=0.005)
    assert summary.gap_cv == pytest.approx(13.2, abs=0.05)
    assert summary.largest_gap_s == pytest.approx(217, abs=1)
    peaks = [window.peak_ratio for window in summary.burstiness]
    assert peaks == pytest.approx([26, 12.8, 4.2], rel=0.03)
    indices = [window.dispersion for window in summary.burstiness]
    assert indices == pytest.approx([13, 71, 161], rel=0.03)
    prompts, outputs = summary.input_tokens, summary.output_tokens
    assert prompts.mean_tokens == pytest.approx(2048, abs=1)
    assert [prompts.quantile_tokens(q) for q in (0.5, 0.9, 0.99)] == pytest.approx(
        [1469, 5194, 7436], abs=8
    )
    assert outputs.mean_tokens == pytest.approx(27.9, abs=0.05)
    assert [outputs.quantile_tokens(q) for q in (0.5, 0.9, 0.99)] == pytest.approx(
        [13, 55, 252], abs=2
    )
    assert abs(summary.correlation) < 0.01
