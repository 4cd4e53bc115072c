"""The recordings that ship as examples, used to test planning from recorded routing."""

from pathlib import Path

import numpy as np

from profilers.routing.recording import Recording
from profilers.routing.skew import skew
from profilers.routing.store import read_header, read_recording
from tests.expect import present

EXAMPLES = Path(__file__).parents[2] / "examples/routing"
DOMAINS = ("python", "documents", "headers")


def recorded(prefix: str, *, most_bytes: int) -> dict[str, Recording]:
    """Recordings by domain, which take no more than so many bytes together."""
    folders = {domain: EXAMPLES / f"{prefix}{domain}" for domain in DOMAINS}
    files = [file for folder in folders.values() for file in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) < most_bytes, prefix
    return {domain: read_recording(folder) for domain, folder in folders.items()}


def test_recordings_hold_all_that_can_be_captured_of_unlike_domains() -> None:
    recordings = recorded("", most_bytes=1_000_000)
    for domain, result in recordings.items():
        assert result.workload == domain
        assert result.count_PLE.shape == (128, 8, 32), domain
        assert (result.layer_ids, result.top_k) == (tuple(range(8)), 4), domain
        # 8 sequences of 256 tokens a pass, 4 choices of each.
        assert (result.count_PLE.sum(axis=2) == 8 * 256 * 4).all(), domain
        assert read_header(EXAMPLES / domain).origin.startswith("captured from qwen3_moe"), domain
        # A choice meets four choices of the next layer.
        pairs_MEE = present(result.transition_MEE)
        np.testing.assert_array_equal(pairs_MEE.sum(axis=2), result.count_LE[:-1] * 4, domain)
        np.testing.assert_array_equal(pairs_MEE.sum(axis=1), result.count_LE[1:] * 4, domain)
        # As in published recordings, a plan for one domain does not fit another.
        assert 2.0 < skew(result).median < 8.0, domain
    one, other = (recordings[name].count_LE.astype(float) for name in ("documents", "headers"))
    likeness = [np.corrcoef(a, b)[0, 1] for a, b in zip(one, other, strict=True)]
    assert 0.3 < np.mean(likeness) < 0.9


def test_wide_and_long_recordings_have_the_experts_of_deepseek_v3_and_a_like_skew() -> None:
    for prefix, sequences, most_bytes in (("wide-", 8, 500_000), ("long-", 96, 1_500_000)):
        for domain, result in recorded(prefix, most_bytes=most_bytes).items():
            assert result.workload == f"{prefix}{domain}"
            assert result.count_PLE.shape == (128, 4, 256), result.workload
            assert result.top_k == 8
            # Sequences of 256 tokens a pass, 8 choices of each.
            assert (result.count_PLE.sum(axis=2) == sequences * 256 * 8).all(), result.workload
            # Published recordings of 256 experts have 5.6 to 8.1, layers up to 13.7.
            assert 5.0 < skew(result).median < 14.0, result.workload
            assert (result.transition_MEE, result.token_LTK) == (None, None), result.workload
