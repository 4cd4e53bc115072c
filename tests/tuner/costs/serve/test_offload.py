import numpy as np
import numpy.typing as npt
import pytest

from tests.rows import each_row
from tuner.costs.serve.offload import PromptSplit, split_at

Floats = npt.NDArray[np.float64]

PROFILE_TOKENS = np.array([1024.0, 8192.0, 32768.0, 131072.0])
PREFILL_S = np.array([0.44, 0.72, 1.84, 7.40])
KV_MIB = np.array([190.8, 308.9, 701.3, 2316.3])
"""Prefill-as-a-Service (arXiv:2604.15039): a hybrid model of 1T parameters on eight H200."""


@pytest.fixture(scope="module")
def prompts() -> tuple[Floats, Floats]:
    """Its lengths: log-normal(9.90, 1.00) within 128 and 131,072 tokens, on a fine grid."""
    edges = np.linspace(np.log(128.0), np.log(131072.0), 20_001)
    middle = 0.5 * (edges[1:] + edges[:-1])
    return np.exp(middle), np.exp(-0.5 * (middle - 9.90) ** 2)


@pytest.fixture(scope="module")
def split(prompts: tuple[Floats, Floats]) -> PromptSplit:
    return split_at(19_400, tokens_N=prompts[0], weight_N=prompts[1])


def test_the_published_threshold_sends_half_of_the_requests(
    prompts: tuple[Floats, Floats], split: PromptSplit
) -> None:
    tokens_N, weight_N = prompts
    assert float(tokens_N @ weight_N / weight_N.sum()) == pytest.approx(27_500, rel=2e-3)
    assert split.long_share == pytest.approx(0.4957, abs=2e-4)
    assert split.long_mean(tokens_N) == pytest.approx(45_000, rel=2e-3)
    assert split.short_mean(tokens_N) == pytest.approx(10_200, rel=5e-3)


def test_four_remote_instances_serve_the_published_rate(
    prompts: tuple[Floats, Floats], split: PromptSplit
) -> None:
    # Published 1.61 requests/s and 13 Gbit/s; 1.58 and 12 at the mean length, from the printed
    # profile. Prefill is convex in length, so the mean of the times is a little longer.
    at_mean_per_s = 4 / float(np.interp(split.long_mean(prompts[0]), PROFILE_TOKENS, PREFILL_S))
    assert at_mean_per_s == pytest.approx(1.58, abs=0.01)
    rate_per_s = 4 / split.long_mean(np.interp(prompts[0], PROFILE_TOKENS, PREFILL_S))
    assert 0.97 * at_mean_per_s < rate_per_s < at_mean_per_s
    bytes_each = split.long_mean(np.interp(prompts[0], PROFILE_TOKENS, KV_MIB) * 2**20)
    assert at_mean_per_s * bytes_each * 8 / 1e9 == pytest.approx(12.0, abs=0.3)


def test_a_cut_by_hand() -> None:
    tokens_N, weight_N = np.array([10.0, 20.0, 30.0, 40.0]), np.array([1.0, 2.0, 3.0, 4.0])
    split = split_at(20.0, tokens_N=tokens_N, weight_N=weight_N)
    assert split.long_share == pytest.approx(0.7)
    assert split.long_mean(tokens_N) == pytest.approx((3 * 30 + 4 * 40) / 7)
    assert split.short_mean(tokens_N) == pytest.approx((10 + 2 * 20) / 3)


@each_row("threshold", [5.0, 40.0])
def test_a_threshold_with_nothing_on_one_side_is_refused(threshold: float) -> None:
    with pytest.raises(ValueError, match="leaves one side empty; prompts have 10 to 40 tokens"):
        split_at(threshold, tokens_N=np.array([10.0, 40.0]), weight_N=np.ones(2))


def test_weights_must_be_weights() -> None:
    with pytest.raises(ValueError, match="weights of prompts must be at least 0"):
        split_at(15.0, tokens_N=np.array([10.0, 40.0]), weight_N=np.array([1.0, -1.0]))
