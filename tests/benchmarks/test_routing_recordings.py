"""The recordings that ship as examples, used to test planning from recorded routing."""

from pathlib import Path

import numpy as np
import pytest

from profilers.routing.recording import Recording
from profilers.routing.skew import skew
from profilers.routing.store import read_header, read_recording
from tests.presence import present
from tests.rows import each_row

EXAMPLES = Path(__file__).parents[2] / "examples/routing"
DOMAINS = ("python", "documents", "headers")


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recording]:
    return {domain: read_recording(EXAMPLES / domain) for domain in DOMAINS}


@each_row("domain", DOMAINS)
def test_a_recording_holds_all_that_can_be_captured(
    recordings: dict[str, Recording], domain: str
) -> None:
    result = recordings[domain]
    assert result.workload == domain
    assert result.count_PLE.shape == (128, 8, 32)
    assert (result.layer_ids, result.top_k) == (tuple(range(8)), 4)
    # 8 sequences of 256 tokens a pass, 4 choices of each.
    assert (result.count_PLE.sum(axis=2) == 8 * 256 * 4).all()
    assert read_header(EXAMPLES / domain).origin.startswith("captured from qwen3_moe")


@each_row("domain", DOMAINS)
def test_pairs_agree_with_counts(recordings: dict[str, Recording], domain: str) -> None:
    result = recordings[domain]
    # A choice meets four choices of the next layer.
    np.testing.assert_array_equal(
        present(result.transition_MEE).sum(axis=2), result.count_LE[:-1] * 4
    )
    np.testing.assert_array_equal(
        present(result.transition_MEE).sum(axis=1), result.count_LE[1:] * 4
    )


def test_domains_are_skewed_and_different(recordings: dict[str, Recording]) -> None:
    """As in published recordings, a plan for one domain does not fit another."""
    for result in recordings.values():
        assert 2.0 < skew(result).median < 8.0
    one, other = (recordings[name].count_LE.astype(float) for name in ("documents", "headers"))
    likeness = [np.corrcoef(a, b)[0, 1] for a, b in zip(one, other, strict=True)]
    assert 0.3 < np.mean(likeness) < 0.9


def test_they_are_small() -> None:
    files = [file for domain in DOMAINS for file in (EXAMPLES / domain).iterdir()]
    assert sum(file.stat().st_size for file in files) < 1_000_000


def test_wide_recordings_have_the_experts_of_deepseek_v3_and_a_like_skew() -> None:
    for domain in DOMAINS:
        result = read_recording(EXAMPLES / f"wide-{domain}")
        assert result.workload == f"wide-{domain}"
        assert result.count_PLE.shape == (128, 4, 256)
        assert result.top_k == 8
        # 8 sequences of 256 tokens a pass, 8 choices of each.
        assert (result.count_PLE.sum(axis=2) == 8 * 256 * 8).all()
        # Published recordings of 256 experts have 5.6 to 8.1, layers up to 13.7.
        assert 5.0 < skew(result).median < 14.0
        assert result.transition_MEE is None
        assert result.token_LTK is None
    files = [file for domain in DOMAINS for file in (EXAMPLES / f"wide-{domain}").iterdir()]
    assert sum(file.stat().st_size for file in files) < 500_000


def test_long_recordings_hold_twelve_times_the_tokens_and_stay_small() -> None:
    for domain in DOMAINS:
        result = read_recording(EXAMPLES / f"long-{domain}")
        assert result.workload == f"long-{domain}"
        assert result.count_PLE.shape == (128, 4, 256)
        # 96 sequences of 256 tokens a pass, 8 choices of each.
        assert (result.count_PLE.sum(axis=2) == 96 * 256 * 8).all()
        assert 5.0 < skew(result).median < 14.0
        assert (EXAMPLES / f"long-{domain}/counts.parquet").stat().st_size < 400_000
